// Drives our attention over random shapes, each tensor in memory of its own, so that AddressSanitizer sees every byte beside it:
// ggml lays the tensors of a graph side by side. Also compares threads and passes over single tokens, bit for bit.
// Built and run by .ci/sanitize. Usage: attention [CASES [SEED [INSTRUCTIONS]]]
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "attention/backend.h"

using namespace ggufspec;

namespace {

constexpr uint16_t kHidden = 0xfc00;  // minus infinity in f16
constexpr int kTypes[] = {ggml::kF16, ggml::kBF16, ggml::kQ8_0};
constexpr int64_t kHeadSizes[] = {16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512};

std::mt19937 generator;
int64_t draw(int64_t first, int64_t last) { return first + int64_t(generator() % uint64_t(last - first + 1)); }
bool once_in(int64_t n) { return draw(1, n) == 1; }

template <class Values>
auto one_of(const Values & values) {
    return values[draw(0, int64_t(std::size(values)) - 1)];
}

// ggml's pool.
struct Pool {
    std::mutex mutex;
    std::condition_variable changed;
    int n_waiting = 0, n_passed = 0, n_threads;
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

size_t n_bytes(int type, int64_t n) {
    if (type == ggml::kF32) return 4 * size_t(n);
    return type == ggml::kQ8_0 ? (size_t(n) + 31) / 32 * 34 : 2 * size_t(n);
}

// A tensor in memory of exactly its size. order: the dimensions 1 to 3, from the one with the smallest stride on.
struct Owned : ggml::Tensor {
    std::unique_ptr<char[]> memory;
    size_t size;

    Owned(int of_type, std::vector<int64_t> sizes, std::vector<int> order = {1, 2, 3}) : ggml::Tensor{} {
        type = of_type;
        std::copy(sizes.begin(), sizes.end(), ne);
        nb[0] = type == ggml::kQ8_0 ? 34 : n_bytes(type, 1);
        size = n_bytes(type, ne[0]);
        for (int i : order) nb[i] = size, size *= size_t(ne[i]);
        memory = std::make_unique<char[]>(size);
        data = memory.get();
        for (size_t i = 0; i < size / n_bytes(type, type == ggml::kQ8_0 ? 32 : 1); i++) fill(i);
    }

private:
    void fill(size_t i) {
        const float value = float(draw(-1000, 1000)) / 500;
        const uint16_t half = uint16_t(draw(0, 1) << 15 | draw(0x3000, 0x3fff)), scale = 0x2000;
        if (type == ggml::kF32) std::memcpy(memory.get() + 4 * i, &value, 4);
        else if (type != ggml::kQ8_0) std::memcpy(memory.get() + 2 * i, &half, 2);
        else {
            std::memcpy(memory.get() + 34 * i, &scale, 2);
            for (int j = 2; j < 34; j++) memory[34 * i + size_t(j)] = char(draw(-127, 127));
        }
    }
};

// Texts as they are, windows, texts of several sequences, rows that see nothing, and distances (ALiBi).
void fill_mask(Owned & mask, bool is_distance) {
    const int64_t n = mask.ne[0], n_tokens = mask.ne[1], kind = draw(0, 4);
    auto * at = reinterpret_cast<uint16_t *>(mask.data);
    for (int64_t i = 0; i < n * n_tokens * mask.ne[3]; i++) {
        const int64_t cell = i % n, token = i / n % n_tokens, last = n - n_tokens + token;
        const bool is_later = cell > last;
        const bool is_hidden[] = {false, is_later, is_later || cell < last - 20, once_in(2), token % 3 != 0 || !once_in(10)};
        at[i] = is_hidden[kind] ? kHidden : is_distance ? uint16_t(0x8000 | draw(0x3c00, 0x5000)) : uint16_t{0};
    }
}

// The bytes of what `n_threads` compute.
std::vector<char> computed(ggml::Tensor op, ggml::Tensor queries, Owned * mask, int n_threads, int64_t token = -1) {
    ggml::Tensor mask_of_token = mask ? static_cast<ggml::Tensor &>(*mask) : ggml::Tensor{};
    if (token >= 0) {
        queries.data = static_cast<char *>(queries.data) + token * int64_t(queries.nb[1]);
        mask_of_token.data = static_cast<char *>(mask_of_token.data) + (mask ? token * int64_t(mask_of_token.nb[1]) : 0);
        queries.ne[1] = mask_of_token.ne[1] = op.ne[2] = 1;
        op.nb[3] = op.nb[2];
    }
    op.src[0] = &queries;
    op.src[3] = mask ? &mask_of_token : nullptr;
    std::vector<char> result(op.nb[3] * size_t(op.ne[3]), char(0xff));
    op.data = result.data();
    ggml::TensorTraits * traits = attention::traits_of(&op);
    size_t size = 0;
    if (!traits->work_size(n_threads, &op, size)) std::abort();
    const auto work = std::make_unique<char[]>(size);
    Pool pool;
    pool.n_threads = n_threads;
    std::vector<std::thread> threads;
    for (int i = 0; i < n_threads; i++) {
        threads.emplace_back([&, i] {
            ggml::ComputeParams of{i, n_threads, size, work.get(), &pool, false};
            if (!traits->compute_forward(&of, &op)) std::abort();
        });
    }
    for (std::thread & each : threads) each.join();
    return result;
}

// Returns whether there is code for the case.
bool try_case() {
    const int type_k = one_of(kTypes), type_v = one_of(kTypes);
    const int64_t d_keys = one_of(kHeadSizes), d_values = once_in(3) ? one_of(kHeadSizes) : d_keys;
    const int64_t n_heads = draw(1, 3), group = draw(1, 7), n_streams = once_in(4) ? draw(2, 3) : 1;
    const int64_t n_tokens = once_in(4) ? draw(18, 150) : draw(1, 17), n_cells = draw(1, 300), n_queries = n_heads * group;
    // As llama.cpp has a cache, the heads of a cell side by side; and each head apart.
    const std::vector<int> order = once_in(4) ? std::vector<int>{1, 2, 3} : std::vector<int>{2, 1, 3};
    Owned queries(ggml::kF32, {d_keys, n_tokens, n_queries, n_streams}, {2, 1, 3});
    Owned keys(type_k, {d_keys, n_cells, n_heads, n_streams}, order),
        values(type_v, {d_values, n_cells, n_heads, n_streams}, order);
    Owned mask(ggml::kF16, {n_cells, n_tokens, 1, once_in(2) ? n_streams : 1}), sinks(ggml::kF32, {n_queries, 1, 1, 1});
    const float parameters[] = {1 / std::sqrt(float(d_keys)), once_in(4) ? 8.0f : 0.0f, once_in(4) ? 5.0f : 0.0f};
    fill_mask(mask, parameters[1] > 0);
    const uint16_t not_finite = 0x7fc0;
    const bool is_finite = !once_in(10);
    if (!is_finite) std::memcpy(once_in(2) ? keys.data : values.data, &not_finite, 2);

    ggml::Tensor op{};
    op.op = ggml::kFlashAttnExt;
    const int64_t sizes[] = {d_values, n_queries, n_tokens, n_streams};
    std::copy(sizes, sizes + 4, op.ne);
    op.nb[0] = sizeof(float);
    for (int i = 1; i < 4; i++) op.nb[i] = op.nb[i - 1] * size_t(op.ne[i - 1]);
    std::memcpy(op.op_params, parameters, sizeof(parameters));
    op.src[0] = &queries, op.src[1] = &keys, op.src[2] = &values, op.src[4] = once_in(3) ? &sinks : nullptr;
    Owned * masked = once_in(8) ? nullptr : &mask;
    if (attention::traits_of(&op) == nullptr) return false;

    const std::vector<char> found = computed(op, queries, masked, 1);
    for (size_t i = 0; is_finite && i < found.size(); i += sizeof(float)) {  // a mean of values, all of which are below 4
        float value;
        std::memcpy(&value, found.data() + i, sizeof(value));
        if (!(std::abs(value) < 4)) std::printf("a mean is %g\n", double(value)), std::exit(1);
    }
    for (int n_threads = 2; n_threads <= 3; n_threads++) {
        if (computed(op, queries, masked, n_threads) != found) std::printf("threads differ\n"), std::exit(1);
    }
    for (int64_t token : {int64_t{0}, n_tokens / 2, n_tokens - 1}) {
        const std::vector<char> alone = computed(op, queries, masked, 1, token);
        for (size_t stream = 0; stream < size_t(n_streams); stream++) {
            const char * at = found.data() + stream * op.nb[3] + size_t(token) * op.nb[2];
            if (std::memcmp(at, alone.data() + stream * op.nb[2], op.nb[2]) != 0)
                std::printf("a token alone differs\n"), std::exit(1);
        }
    }
    return true;
}

}  // namespace

int main(int n_arguments, char ** arguments) {
    const int n_cases = n_arguments > 1 ? std::atoi(arguments[1]) : 300;
    generator.seed(n_arguments > 2 ? unsigned(std::atoi(arguments[2])) : 1);
    ggml::Functions functions{};
    functions.ggml_barrier = barrier;
    functions.ggml_threadpool_chunk_set = [](void * of, int value) { static_cast<Pool *>(of)->chunk = value; };
    functions.ggml_threadpool_chunk_add = [](void * of, int value) { return static_cast<Pool *>(of)->chunk.fetch_add(value); };
    attention::set_kernels(functions, attention::find_kernels(n_arguments > 3 ? arguments[3] : "avx2"));
    attention::use(true);
    int n_done = 0;
    for (int i = 0; i < n_cases; i++) n_done += try_case();
    std::printf("attention: %d of %d cases have code\n", n_done, n_cases);
    return n_done > n_cases / 2 ? 0 : 1;
}
