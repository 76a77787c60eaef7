// Drives the code of native/ that several threads run at once, with ggml's threads and llama.cpp replaced by these: for
// ThreadSanitizer, which knows nothing of the barriers in libraries that it did not compile. Built and run by .ci/sanitize.
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "context.h"
#include "matmul/backend.h"
#include "sampling.h"

using namespace ggufspec;

namespace {

constexpr int kThreads = 4;
constexpr int64_t kColumns = 2048, kRows = 1000, kExperts = 4, kTokens = 7;
constexpr int kQ4_0 = 2;
constexpr size_t kBlockBytes = 18;  // of 32 values in Q4_0

void require(bool holds, const char * what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

template <class Work>
void in_threads(Work work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; i++) threads.emplace_back([work, i] { work(i); });
    for (std::thread & each : threads) each.join();
}

// ggml's pool.
struct Pool {
    std::mutex mutex;
    std::condition_variable changed;
    int n_waiting = 0, n_passed = 0, n_threads = kThreads;
    std::atomic<int> chunk{0};
};

void barrier(void * of) {
    Pool & pool = *static_cast<Pool *>(of);
    std::unique_lock<std::mutex> lock(pool.mutex);
    const int passed = pool.n_passed;
    if (++pool.n_waiting == pool.n_threads) {
        pool.n_waiting = 0;
        pool.n_passed++;
        pool.changed.notify_all();
    } else {
        pool.changed.wait(lock, [&] { return pool.n_passed != passed; });
    }
}

std::vector<ggml::BufferType *> extra_types;
ggml::BufferType cpu_type{};
std::vector<char> memory(64 << 20);

ggml::Functions functions() {
    return {
        []() -> std::vector<ggml::BufferType *> & { return extra_types; },
        barrier,
        [](void * pool, int value) { static_cast<Pool *>(pool)->chunk.store(value, std::memory_order_relaxed); },
        [](void * pool, int value) { return static_cast<Pool *>(pool)->chunk.fetch_add(value, std::memory_order_relaxed); },
        [] { return &cpu_type; },
        [](ggml::BufferType *, size_t size) {
            static ggml::Buffer buffer{};
            buffer.get_base = [](ggml::Buffer *) -> void * { return memory.data(); };
            buffer.size = size;
            return &buffer;
        },
        [](ggml::BufferType *) { return true; },
    };
}

ggml::Tensor tensor(int type, size_t value_bytes, std::vector<int64_t> shape, void * data) {
    ggml::Tensor made{};
    made.type = type;
    for (int i = 0; i < 4; i++) made.ne[i] = i < int(shape.size()) ? shape[i] : 1;
    made.nb[0] = value_bytes;
    made.nb[1] = type == kQ4_0 ? made.ne[0] / 32 * kBlockBytes : value_bytes * made.ne[0];
    for (int i = 2; i < 4; i++) made.nb[i] = made.nb[i - 1] * made.ne[i - 1];
    made.data = data;
    return made;
}

std::vector<float> product(ggml::Tensor & weights, int op_code, int n_threads) {
    std::vector<float> in(kColumns * kTokens), out(kRows * kTokens);
    std::vector<int32_t> experts(kTokens);
    for (size_t i = 0; i < in.size(); i++) in[i] = float(i % 13) - 6;
    for (size_t i = 0; i < experts.size(); i++) experts[i] = i * 3 % kExperts;
    const bool is_mixture = op_code == ggml::kMulMatId;
    const std::vector<int64_t> in_shape =
        is_mixture ? std::vector<int64_t>{kColumns, 1, kTokens} : std::vector<int64_t>{kColumns, kTokens};
    const std::vector<int64_t> out_shape =
        is_mixture ? std::vector<int64_t>{kRows, 1, kTokens} : std::vector<int64_t>{kRows, kTokens};
    ggml::Tensor rows = tensor(ggml::kF32, 4, in_shape, in.data()), ids = tensor(26, 4, {1, kTokens}, experts.data());
    ggml::Tensor op = tensor(ggml::kF32, 4, out_shape, out.data());
    op.op = op_code;
    op.src[0] = &weights, op.src[1] = &rows, op.src[2] = &ids;
    ggml::TensorTraits * traits = static_cast<ggml::ExtraBufferType *>(weights.buffer->type->context)->get_tensor_traits(&op);
    require(traits != nullptr, "there is a kernel");
    size_t size = 0;
    traits->work_size(n_threads, &op, size);
    std::vector<char> work(size + 64);
    Pool pool;
    pool.n_threads = n_threads;
    const auto compute = [&](int i) {
        ggml::ComputeParams params{i, n_threads, work.size(), work.data(), &pool, false};
        if (i < n_threads) traits->compute_forward(&params, &op);
    };
    for (int repeat = 0; repeat < 5; repeat++) in_threads(compute);
    return out;
}

void products() {
    const std::vector<const matmul::Instructions *> found = matmul::supported_instructions();
    if (found.empty()) return;
    matmul::register_buffer_type(functions(), *found[0]);
    ggml::Tensor weights = tensor(kQ4_0, kBlockBytes, {kColumns, kRows, kExperts}, memory.data());
    std::vector<uint8_t> file(weights.nb[3]);
    for (size_t i = 0; i < file.size(); i++) file[i] = i % kBlockBytes == 1 ? 0x2c : uint8_t(i * 7);
    weights.buffer = extra_types[0]->alloc_buffer(extra_types[0], memory.size());
    weights.buffer->set_tensor(weights.buffer, &weights, file.data(), 0, file.size());  // packs in threads
    require(product(weights, ggml::kMulMatId, 1) == product(weights, ggml::kMulMatId, kThreads), "experts: as in one thread");
    weights.ne[2] = 1;
    require(product(weights, ggml::kMulMat, 1) == product(weights, ggml::kMulMat, kThreads), "a matrix: as in one thread");
}

// Rows of their own, of the same logits, with the same options.
void rows() {
    std::vector<float> logits(50000);
    for (size_t i = 0; i < logits.size(); i++) logits[i] = float(i * 31 % 1009) / 100;
    Sampling sampling;
    sampling.order = {Sampler::penalties, Sampler::top_k, Sampler::typical_p, Sampler::temperature};
    sampling.top_k = 40, sampling.typical_p = 0.9f, sampling.temperature = 0.7f, sampling.penalty_last_n = -1,
    sampling.repeat_penalty = 1.1f;
    const std::vector<int32_t> tokens{1, 2, 3};
    in_threads([&](int) {
        for (int i = 0; i < 20; i++) {
            Row row;
            require(row.set(logits.data(), logits.size(), sampling, {tokens.data(), tokens.size()}, nullptr, false),
                    "a row can be set");
            require(row.pick(0.5) >= 0, "a token can be drawn");
        }
    });
}

// Two contexts at once, of which a batch lasts until it is interrupted.
bool (*abort_callbacks[2])(void *);
void * abort_data[2];

void contexts() {
    const Functions fakes{
        [](void * context, Batch) -> int32_t {
            const size_t i = *static_cast<size_t *>(context);
            for (int n = 0; n < 4000; n++) {
                if (abort_callbacks[i](abort_data[i])) return 2;
                std::this_thread::sleep_for(std::chrono::microseconds(100));
            }
            return 0;
        },
        [](void *) {},
        [](void *, int32_t) -> float * { return nullptr; },
        [](void *, int32_t, int32_t, int32_t) { return true; },
        [](void *, int32_t, int32_t, int32_t, int32_t) {},
        [](void *, int32_t) -> int32_t { return -1; },
        [](void * context, bool (*callback)(void *), void * data) {
            const size_t i = *static_cast<size_t *>(context);
            abort_callbacks[i] = callback, abort_data[i] = data;
        },
    };
    size_t numbers[2] = {0, 1};
    Context first(fakes, &numbers[0], nullptr, 8, 1, 1, 0, false, 0, false),
        second(fakes, &numbers[1], nullptr, 8, 1, 1, 0, false, 0, false);
    const int32_t token = 1;
    int n_asked = 0;
    for (Context * each : {&first, &second}) each->begin(), each->add(0, &token, 1, 1);
    const auto found = run_beside(first, second, [&] { return ++n_asked > 1; });
    require(found.first == 2 && found.second == 2, "both are interrupted");
}

}  // namespace

int main() {
    products();
    rows();
    contexts();
    std::puts("products, rows, contexts: no races");
}
