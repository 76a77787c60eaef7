#include "backend.h"

#include "../attention/backend.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>
#include <tuple>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ggufspec::matmul {
namespace {

ggml::Functions ggml_functions{};
const Instructions * instructions = nullptr;
thread_local std::vector<int> offered;
thread_local bool offers_both = false;

constexpr size_t kAlignment = 64;
constexpr size_t kChunk = size_t{256} << 10;  // bytes of weights that stay in a core's cache while many rows are multiplied
constexpr int64_t kChunksPerThread = 4;       // several, so that the other threads wait less for a slow core
constexpr size_t kPackPerThread = 1 << 20;  // least bytes to pack for which a thread is started

size_t aligned(size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

int64_t n_groups(const ggml::Tensor * weights) { return (weights->ne[1] + instructions->width - 1) / instructions->width; }

// Packed bytes of one matrix; a tensor of experts has several matrices.
size_t packed_bytes(const Kernel & kernel, const ggml::Tensor * weights) {
    return n_groups(weights) * (weights->ne[0] / kernel.n_values) * kernel.packed_bytes;
}

ggml::BufferType * packed_type();
ggml::BufferType * both_type();

size_t file_bytes(const ggml::Tensor * weights) { return weights->nb[2] * weights->ne[2]; }

// The packed weights; they come after the file's weights if these are kept.
uint8_t * packed_of(const ggml::Tensor * weights) {
    return static_cast<uint8_t *>(weights->data) + (weights->buffer->type == both_type() ? aligned(file_bytes(weights)) : 0);
}

struct Traits final : ggml::TensorTraits {
    const Kernel & kernel;
    explicit Traits(const Kernel & kernel) : kernel(kernel) {}

    size_t row_bytes(const ggml::Tensor * op) const { return aligned(op->src[0]->ne[0] / kernel.n_values * kernel.active_bytes); }

    static int64_t n_rows(const ggml::Tensor * of) { return of->ne[1] * of->ne[2] * of->ne[3]; }

    bool work_size(int, const ggml::Tensor * op, size_t & size) override {
        size = row_bytes(op) * n_rows(op->src[1]);
        if (op->op == ggml::kMulMatId) size += sizeof(int32_t) * (op->src[0]->ne[2] + 1 + n_rows(op));
        return true;
    }

    bool compute_forward(ggml::ComputeParams * params, ggml::Tensor * op) override {
        if (params->ith == 0) ggml_functions.ggml_threadpool_chunk_set(params->threadpool, params->nth);
        convert_rows(params, op);
        if (op->op == ggml::kMulMat) {
            ggml_functions.ggml_barrier(params->threadpool);
            multiply_all(params, op);
        } else {
            if (params->ith == 0) sort_by_expert(params, op);
            ggml_functions.ggml_barrier(params->threadpool);
            multiply_experts(params, op);
        }
        return true;
    }

private:
    static char * row_of(const ggml::Tensor * tensor, int64_t i) {
        const int64_t second = i / tensor->ne[1];
        return static_cast<char *>(tensor->data) + i % tensor->ne[1] * tensor->nb[1] + second % tensor->ne[2] * tensor->nb[2] +
               second / tensor->ne[2] * tensor->nb[3];
    }

    const void * converted(const ggml::ComputeParams * params, const ggml::Tensor * op, int64_t row) const {
        return static_cast<char *>(params->wdata) + row * row_bytes(op);
    }

    // All threads share the work by parts of rows, since there is usually a single row.
    void convert_rows(ggml::ComputeParams * params, const ggml::Tensor * op) const {
        const ggml::Tensor * rows = op->src[1];
        const int64_t n_blocks = rows->ne[0] / kBlock, n = n_blocks * n_rows(rows);
        const int64_t end = n * (params->ith + 1) / params->nth;
        for (int64_t i = n * params->ith / params->nth; i < end;) {
            const int64_t row = i / n_blocks, first = i % n_blocks, last = std::min(n_blocks, first + end - i);
            kernel.convert(const_cast<void *>(converted(params, op, row)), reinterpret_cast<const float *>(row_of(rows, row)),
                           first, last);
            i += last - first;
        }
    }

    struct Chunks {
        int64_t n, n_groups;  // number of chunks, and groups per chunk; the last chunk may have fewer
    };

    Chunks chunks(const ggml::ComputeParams * params, const ggml::Tensor * op) const {
        const int64_t groups = n_groups(op->src[0]);
        const int64_t cached = kChunk / (op->src[0]->ne[0] / kernel.n_values * kernel.packed_bytes);
        const int64_t size = std::clamp<int64_t>(groups / (kChunksPerThread * params->nth), 1, std::max<int64_t>(cached, 1));
        return {(groups + size - 1) / size, size};
    }

    // at(i), for i < n: the row of activations and where its result goes.
    template <class At>
    void multiply_chunk(const ggml::Tensor * op, const uint8_t * weights, int64_t n, int64_t begin, int64_t end, At at) const {
        const ggml::Tensor * of = op->src[0];
        const int64_t n_calls = (n + instructions->most - 1) / instructions->most;
        for (int64_t call = 0; call < n_calls; call++) {
            const void * rows[16];
            float * out[16];
            const int64_t first = n * call / n_calls, last = n * (call + 1) / n_calls;
            for (int64_t i = first; i < last; i++) std::tie(rows[i - first], out[i - first]) = at(i);
            kernel.multiply(int(last - first), weights, rows, out, of->ne[0] / kernel.n_values, of->ne[1], begin, end);
        }
    }

    void multiply_all(ggml::ComputeParams * params, ggml::Tensor * op) const {
        const ggml::Tensor * of = op->src[0];
        const Chunks parts = chunks(params, op);
        const int64_t groups = n_groups(of);
        for (int64_t chunk = params->ith; chunk < parts.n;
             chunk = ggml_functions.ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t begin = chunk * parts.n_groups;
            multiply_chunk(op, packed_of(of), n_rows(op), begin, std::min(begin + parts.n_groups, groups), [&](int64_t i) {
                return std::make_pair(converted(params, op, i), reinterpret_cast<float *>(row_of(op, i)));
            });
        }
    }

    // op->src[2] has the experts of each token: (n_used, n_tokens). Working memory after the activations: for each expert, the
    // start of its rows, then all rows sorted by expert; a row is an index into src[2].
    int32_t * places(const ggml::ComputeParams * params, const ggml::Tensor * op) const {
        return reinterpret_cast<int32_t *>(static_cast<char *>(params->wdata) + row_bytes(op) * n_rows(op->src[1]));
    }

    static int32_t expert_of(const ggml::Tensor * op, int64_t place) {
        return *reinterpret_cast<const int32_t *>(row_of(op->src[2], place / op->ne[1]) + place % op->ne[1] * op->src[2]->nb[0]);
    }

    void sort_by_expert(ggml::ComputeParams * params, const ggml::Tensor * op) const {
        const int64_t n_experts = op->src[0]->ne[2], n = n_rows(op);
        int32_t *starts = places(params, op), *sorted = starts + n_experts + 1;
        std::fill(starts, starts + n_experts + 1, 0);
        for (int64_t i = 0; i < n; i++) starts[expert_of(op, i) + 1]++;
        std::partial_sum(starts, starts + n_experts + 1, starts);
        for (int64_t i = 0; i < n; i++) sorted[starts[expert_of(op, i)]++] = int32_t(i);
        for (int64_t i = n_experts; i > 0; i--) starts[i] = starts[i - 1];  // each has moved to the start of the next
        starts[0] = 0;
    }

    void multiply_experts(ggml::ComputeParams * params, ggml::Tensor * op) const {
        const ggml::Tensor * of = op->src[0];
        const Chunks parts = chunks(params, op);
        const int64_t groups = n_groups(of), n_experts = of->ne[2];
        const int32_t *starts = places(params, op), *sorted = starts + n_experts + 1;
        int64_t mine = params->ith, before = 0;  // chunk numbers; experts without rows have no chunks
        for (int64_t expert = 0; expert < n_experts; expert++) {
            const int64_t n = starts[expert + 1] - starts[expert];
            if (n == 0) continue;
            for (; mine < before + parts.n; mine = ggml_functions.ggml_threadpool_chunk_add(params->threadpool, 1)) {
                const int64_t begin = (mine - before) * parts.n_groups;
                const auto at = [&](int64_t i) {
                    const int32_t place = sorted[starts[expert] + i];
                    const int64_t used = place % op->ne[1], token = place / op->ne[1];
                    return std::make_pair(converted(params, op, token * op->src[1]->ne[1] + used % op->src[1]->ne[1]),
                                          reinterpret_cast<float *>(row_of(op, place)));
                };
                multiply_chunk(op, packed_of(of) + expert * packed_bytes(kernel, of), n, begin,
                               std::min(begin + parts.n_groups, groups), at);
            }
            before += parts.n;
        }
    }
};

// What ggml's threads use is never freed: they may compute while the process ends, when statics are destroyed.

// The traits for a tensor; null if there is no kernel for it.
Traits * traits_of(const ggml::Tensor * weights) {
    static std::vector<Traits> & all = *[] {
        auto * found = new std::vector<Traits>;
        for (size_t i = 0; i < instructions->n_kernels; i++) found->emplace_back(instructions->kernels[i]);
        return found;
    }();
    if (weights->ne[3] != 1) return nullptr;
    for (Traits & each : all) {
        if (each.kernel.type == weights->type && weights->ne[0] % each.kernel.n_values == 0) return &each;
    }
    return nullptr;
}

struct Extra final : ggml::ExtraBufferType {
    const bool is_both;
    explicit Extra(bool is_both) : is_both(is_both) {}

    bool supports_op(void *, const ggml::Tensor * op) override {
        if (op->op == ggml::kFlashAttnExt || get_tensor_traits(op) == nullptr) return false;
        const ggml::Tensor *weights = op->src[0], *rows = op->src[1];
        if (weights->buffer->size == 0) {  // llama.cpp asks with an empty buffer before it loads a tensor
            if (offers_both != is_both || std::find(offered.begin(), offered.end(), weights->type) == offered.end()) return false;
        }
        if (weights->ne[2] != 1 && op->op == ggml::kMulMat) return false;
        return rows->type == ggml::kF32 && rows->nb[0] == sizeof(float) &&
               !(rows->buffer && !ggml_functions.ggml_backend_buft_is_host(rows->buffer->type));
    }

    ggml::TensorTraits * get_tensor_traits(const ggml::Tensor * op) override {
        if (op->op == ggml::kFlashAttnExt) return is_both ? nullptr : attention::traits_of(op);  // one of the two types answers
        if (op->op != ggml::kMulMat && op->op != ggml::kMulMatId) return nullptr;
        const ggml::Buffer * buffer = op->src[0]->buffer;
        return buffer && buffer->type == (is_both ? both_type() : packed_type()) ? traits_of(op->src[0]) : nullptr;
    }
};

void set_tensor(ggml::Buffer *, ggml::Tensor * tensor, const void * data, size_t, size_t) {
    const Kernel & kernel = traits_of(tensor)->kernel;
    const int64_t groups = n_groups(tensor), n_all = groups * tensor->ne[2], n_super = tensor->ne[0] / kernel.n_values;
    const size_t n_bytes = n_super * tensor->ne[1] * kernel.file_bytes;
    const auto pack = [&](int64_t begin, int64_t end) {
        if (packed_of(tensor) != tensor->data) {
            const size_t n_file = file_bytes(tensor), from = n_file * begin / n_all, to = n_file * end / n_all;
            std::memcpy(static_cast<char *>(tensor->data) + from, static_cast<const char *>(data) + from, to - from);
        }
        for (int64_t i = begin; i < end;) {
            const int64_t expert = i / groups, first = i % groups, last = std::min(groups, first + end - i);
            kernel.pack(packed_of(tensor) + expert * packed_bytes(kernel, tensor),
                        static_cast<const uint8_t *>(data) + expert * n_bytes, n_super, tensor->ne[1], first, last);
            i += last - first;
        }
    };
    const int64_t n =
        std::clamp<int64_t>(n_bytes * tensor->ne[2] / kPackPerThread, 1, std::max(1u, std::thread::hardware_concurrency()));
    std::vector<std::thread> others;
    int64_t begin = 0;
    try {
        for (; int64_t(others.size()) < n - 1; begin = n_all * int64_t(others.size()) / n) {
            others.emplace_back(pack, begin, n_all * int64_t(others.size() + 1) / n);
        }
    } catch (const std::exception &) {
        // No memory for a thread: this thread does the remaining work.
    }
    pack(begin, n_all);
    for (std::thread & each : others) each.join();
}

// Each pass reads all weights; with huge pages it needs fewer page look-ups. Some systems give them only on request.
void ask_for_huge_pages(void * data, size_t size) {
#ifdef MADV_HUGEPAGE
    const auto begin = reinterpret_cast<uintptr_t>(data), page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (begin + page - 1) / page * page, end = (begin + size) / page * page;
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
#else
    (void) data, (void) size;
#endif
}

ggml::Buffer * allocate(ggml::BufferType * type, size_t size) {
    ggml::Buffer * buffer = ggml_functions.ggml_backend_buft_alloc_buffer(ggml_functions.ggml_backend_cpu_buffer_type(), size);
    if (buffer == nullptr) return nullptr;
    ask_for_huge_pages(buffer->get_base(buffer), size);
    buffer->type = type;
    buffer->set_tensor = set_tensor;
    if (type == packed_type()) buffer->get_tensor = nullptr, buffer->cpy_tensor = nullptr;
    return buffer;
}

size_t allocated_bytes(ggml::BufferType *, const ggml::Tensor * tensor) {
    const Traits * traits = traits_of(tensor);
    if (traits == nullptr) return tensor->nb[3] * tensor->ne[3];
    return packed_bytes(traits->kernel, tensor) * tensor->ne[2];
}

size_t allocated_bytes_of_both(ggml::BufferType * type, const ggml::Tensor * tensor) {
    const size_t n_packed = allocated_bytes(type, tensor);
    return traits_of(tensor) == nullptr ? n_packed : aligned(file_bytes(tensor)) + n_packed;
}

ggml::BufferType * packed_type() {
    static Extra & extra = *new Extra(false);
    static ggml::BufferType type = {
        [](ggml::BufferType *) { return "GGUFSPEC"; },
        allocate,
        [](ggml::BufferType *) { return kAlignment; },
        nullptr,
        allocated_bytes,
        nullptr,
        ggml_functions.ggml_backend_cpu_buffer_type()->device,
        &extra,
    };
    return &type;
}

// A buffer with the file's weights, which devices read for prompts, and the packed weights for few tokens. During loading it
// is not reported as a host buffer: llama.cpp would read the file directly into it, and nothing would be packed.
ggml::BufferType * both_type() {
    static Extra & extra = *new Extra(true);
    static ggml::BufferType type = {
        [](ggml::BufferType *) { return "GGUFSPEC_Both"; },
        allocate,
        [](ggml::BufferType *) { return kAlignment; },
        nullptr,
        allocated_bytes_of_both,
        [](ggml::BufferType *) { return offered.empty(); },
        ggml_functions.ggml_backend_cpu_buffer_type()->device,
        &extra,
    };
    return &type;
}

}  // namespace

void register_buffer_type(const ggml::Functions & functions, const Instructions & chosen) {
    if (instructions != nullptr) return;
    ggml_functions = functions;
    instructions = &chosen;
    attention::set_kernels(functions, attention::find_kernels(chosen.name));
    auto & types = functions.ggml_backend_cpu_get_extra_buffer_types();
    types.insert(types.begin(), {packed_type(), both_type()});
}

void offer(std::vector<int> types, bool both) {
    offered = std::move(types);
    offers_both = both;
}

}  // namespace ggufspec::matmul
