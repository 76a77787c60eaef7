// Python bindings: types, shapes and the GIL; no arithmetic. *_bindings.cpp have those of each subject; this file makes the module.
#include "bindings.h"

#include <exception>
#include <string>

#include "context.h"
#include "kernels.h"
#include "matmul/bindings.h"
#include "unlocked.h"

namespace ggufspec::bindings {

void require(bool holds, const char * message) {
    if (!holds) throw nb::value_error(message);
}

void require_tokens(const int32_t * tokens, size_t n, size_t n_vocab) {
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] >= 0 && static_cast<size_t>(tokens[i]) < n_vocab) continue;
        throw nb::value_error(("token " + std::to_string(tokens[i]) + " is outside the vocabulary").c_str());
    }
}

void require_parents(const Tokens & parents, size_t n) {
    require(parents.empty() || parents.size() == n, "a tree needs a parent for each node");
    for (size_t i = 0; i < parents.size(); i++) {
        require(parents[i] >= -1 && parents[i] < int32_t(i), "a node of a tree must follow its parent");
    }
}

}  // namespace ggufspec::bindings

NB_MODULE(_native, m) {
    namespace nb = nanobind;
    using ggufspec::Unlocked;
    Unlocked::start(nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")));
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&Unlocked::end));
    nb::set_leak_warnings(false);  // at the interpreter's end, threads may still hold objects
    nb::register_exception_translator([](const std::exception_ptr & thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const ggufspec::DecodeError & error) {  // imported now: the stub is made without the package
            PyErr_SetString(nb::module_::import_("ggufspec.errors").attr("DecodeError").ptr(), error.what());
        }
    });
    m.doc() = "Sampling, verification, draft length, n-grams and batches.";
    m.attr("silent_log") = reinterpret_cast<uintptr_t>(+[](int, const char *, void *) {});  // a ggml_log_callback
    m.attr("instructions") = ggufspec::kernels.instructions;  // used by the loops over rows: see kernels.h
    ggufspec::bindings::bind_sampling(m);
    ggufspec::bindings::bind_verify(m);
    ggufspec::bindings::bind_length(m);
    ggufspec::bindings::bind_context(m);
    ggufspec::bindings::bind_ngrams(m);
    ggufspec::matmul::bind(m);
}
