// Work without Python's lock (the GIL), and its end with the process.
//
// Once the interpreter ends, Python ends every thread that asks for the lock (until 3.13 by unwinding it, through C++ code that
// cannot be unwound), and statics are destroyed, llama.cpp's as well. So before that, passes of other threads are stopped.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace ggufspec {

// Releases the lock as long as it lives. Not in other threads than the main one once the process ends: they keep it.
class Unlocked {
public:
    Unlocked() {
        if (must_stop()) return;
        n_alive_++;
        state_ = PyEval_SaveThread();
    }
    ~Unlocked() {
        if (state_ == nullptr) return;
        PyEval_RestoreThread(state_);
        n_alive_--;
    }
    Unlocked(const Unlocked &) = delete;
    Unlocked & operator=(const Unlocked &) = delete;

    // Whether the process ends, and this is not the main thread, which runs what is left to do.
    static bool must_stop() { return is_ending_ && PyThread_get_thread_ident() != main_thread_; }

    // A condition that ends long work of this thread: it runs signal handlers in the main thread, and keeps what they raise.
    static std::function<bool()> interrupt(std::exception_ptr & raised) {
        if (PyThread_get_thread_ident() != main_thread_) return [] { return is_ending_.load(); };
        return [&raised] {
            nanobind::gil_scoped_acquire acquire;
            // Not left in the thread's state: llama.cpp logs next, through a callback in Python.
            if (!raised && PyErr_CheckSignals() != 0) raised = std::make_exception_ptr(nanobind::python_error());
            return raised != nullptr;
        };
    }

    // Raises SystemExit where a thread must stop: Python ends it without a message.
    static void check() {
        if (!must_stop()) return;
        PyErr_SetNone(PyExc_SystemExit);
        throw nanobind::python_error();
    }

    // Called as the module is imported.
    static void start(unsigned long main_thread) {
        main_thread_ = main_thread;
#ifndef _WIN32
        pthread_atfork(nullptr, nullptr, [] { n_alive_ = 0; });  // the other threads do not exist in the new process
#endif
    }

    // Stops other threads, and waits for them. A pass on a GPU cannot be stopped: it has some seconds to end.
    static void end() {
        is_ending_ = true;
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (n_alive_ > 0 && std::chrono::steady_clock::now() < until) {
            {
                nanobind::gil_scoped_release release;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
        }
    }

private:
    PyThreadState * state_ = nullptr;
    inline static std::atomic<int> n_alive_{0};
    inline static std::atomic<bool> is_ending_{false};
    inline static unsigned long main_thread_ = 0;
};

}  // namespace ggufspec
