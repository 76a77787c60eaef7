#include "backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace ggufspec::attention {
namespace {

ggml::Functions ggml_functions{};
const Kernels * kernels = nullptr;
thread_local bool is_used = false;
thread_local bool has_own = false, has_other = false;  // attention of passes since `use`

constexpr int64_t kTile = 48;        // rows that a thread computes over all cells, for prompts
constexpr int64_t kMostShared = 96;  // rows of a KV head up to which threads share the cells
constexpr int64_t kMostCells = int64_t{1} << 20, kMostValues = 512;
constexpr size_t kAlignment = 64;
// All threads of a pass have to agree, so the thread that plans it marks the operation: in a parameter that ggml does not use.
constexpr int kMark = 15, kMarked = 0x67677566;

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

const char * at(const ggml::Tensor * tensor, int64_t i, int64_t j, int64_t k) {
    return static_cast<const char *>(tensor->data) + i * tensor->nb[1] + j * tensor->nb[2] + k * tensor->nb[3];
}

// The rows of a KV head: those of all its query heads, for all tokens of a stream. Row i is of token i / group.
struct Shape {
    const ggml::Tensor *op, *queries = op->src[0], *keys = op->src[1], *values = op->src[2], *mask = op->src[3];
    int64_t d_keys = keys->ne[0], d_values = values->ne[0], n_cells = keys->ne[1], n_streams = queries->ne[3];
    int64_t n_heads = keys->ne[2], group = queries->ne[2] / n_heads, n_tokens = queries->ne[1], n_rows = group * n_tokens;
    int64_t n_groups = (n_cells + kCells - 1) / kCells, n_padded = n_groups * kCells;
    float scale, bias, cap;

    explicit Shape(const ggml::Tensor * op) : op(op) {
        const auto parameter = [&](int i) {
            float found;
            std::memcpy(&found, op->op_params + i, sizeof(found));
            return found;
        };
        scale = parameter(0), bias = parameter(1), cap = parameter(2);
        if (cap != 0) scale /= cap;
    }

    bool is_shared() const { return n_rows <= kMostShared; }
    int64_t n_tile() const { return is_shared() ? n_rows : std::min(n_rows, kTile); }
    int64_t n_queries() const { return is_shared() ? n_heads * n_rows : n_tile(); }  // that a thread holds
    int64_t tile_tokens() const { return is_shared() ? n_tokens : std::min(n_tokens, kTile / group + 2); }

    int64_t n_in(int64_t group_of_cells) const { return std::min<int64_t>(kCells, n_cells - kCells * group_of_cells); }
    const uint16_t * mask_of(int64_t token, int64_t stream) const {
        return mask ? reinterpret_cast<const uint16_t *>(at(mask, token, 0, stream % mask->ne[3])) : nullptr;
    }
    float * out(int64_t row, int64_t head, int64_t stream) const {
        return reinterpret_cast<float *>(const_cast<char *>(at(op, head * group + row % group, row / group, stream)));
    }
    float slope(int64_t head) const {
        if (bias <= 0) return 1;
        const int64_t n = queries->ne[2], n_first = int64_t{1} << int64_t(std::floor(std::log2(double(n))));
        if (head < n_first) return std::pow(std::pow(2.0f, -bias / float(n_first)), float(head + 1));
        return std::pow(std::pow(2.0f, -bias / 2 / float(n_first)), float(2 * (head - n_first) + 1));
    }
};

// Working memory, cut into parts.
class Memory {
public:
    explicit Memory(void * begin) : at_(static_cast<char *>(begin)) {}
    template <class T>
    T * take(int64_t n) {
        char * found = at_;
        at_ += up(n * int64_t(sizeof(T)), kAlignment);
        return reinterpret_cast<T *>(found);
    }
    size_t size(const void * since) const { return size_t(at_ - static_cast<const char *>(since)); }

private:
    char * at_;
};

// A thread's own memory.
struct Scratch {
    float *cells, *queries, *scores, *largest;
    int32_t *sums, *groups, *visible;
    uint8_t * seen;

    Scratch(Memory & memory, const Shape & shape)
        : cells(memory.take<float>(kCells * std::max(shape.d_keys, shape.d_values))),
          queries(memory.take<float>(shape.n_queries() * shape.d_keys)),
          scores(memory.take<float>(shape.is_shared() ? 0 : shape.n_tile() * shape.n_padded)),
          largest(memory.take<float>(shape.is_shared() ? 0 : shape.n_padded)),
          sums(memory.take<int32_t>(shape.is_shared() ? 0 : shape.n_tile() * shape.d_values)),
          groups(memory.take<int32_t>(shape.n_groups + 1)),
          visible(memory.take<int32_t>(shape.n_groups)),
          seen(memory.take<uint8_t>(shape.n_groups * shape.tile_tokens())) {}
};

// What the threads share if they share cells. sums: of each thread.
struct Shared {
    float *scores, *largest, *factors;
    int32_t * sums;

    Shared(Memory & memory, const Shape & shape, int n_threads) {
        const int64_t n_heads = shape.is_shared() ? shape.n_streams * shape.n_heads : 0, n_rows = n_heads * shape.n_rows;
        scores = memory.take<float>(n_rows * shape.n_padded);
        largest = memory.take<float>(n_heads * shape.n_padded);
        factors = memory.take<float>(n_rows);
        sums = memory.take<int32_t>(n_threads * n_rows * shape.d_values);
    }
};

// The groups of cells that one of some tokens sees: their numbers, and for each the tokens that see it.
struct Groups {
    int32_t * numbers;
    uint8_t * seen;
    int64_t n = 0, first, n_tokens;

    Groups(const Shape & shape, const Scratch & scratch, int64_t stream, int64_t first, int64_t end)
        : numbers(scratch.groups), seen(scratch.seen), first(first), n_tokens(end - first) {
        for (int64_t group = 0; group < shape.n_groups; group++) {
            uint8_t * by = seen + n * n_tokens;
            bool is_seen = shape.mask == nullptr;
            std::fill(by, by + n_tokens, uint8_t{is_seen});
            for (int64_t i = 0; shape.mask && i < n_tokens; i++) {
                by[i] = is_visible(shape.mask_of(first + i, stream) + kCells * group, shape.n_in(group));
                is_seen |= by[i] != 0;
            }
            if (is_seen) numbers[n++] = int32_t(group);
        }
    }
};

// Some rows of a KV head.
struct Part {
    const Shape & shape;
    const Scratch & scratch;
    int64_t stream, head, first, end;   // rows
    float *queries, *scores, *largest;  // of these rows
    int32_t * sums;

    void load_queries() const {
        for (int64_t row = first; row < end; row++) {
            const auto * from = reinterpret_cast<const float *>(
                at(shape.queries, row / shape.group, head * shape.group + row % shape.group, stream));
            float * to = queries + (row - first) * shape.d_keys;
            for (int64_t i = 0; i < shape.d_keys; i++) to[i] = from[i] * shape.scale;
        }
    }

    // Calls take(n, row) for each of the rows that see the i-th visible group of cells: n counts them, and a row is relative to
    // the first one. Returns their number.
    template <class Take>
    int for_rows(const Groups & groups, int64_t i, Take take) const {
        const uint8_t * seen = groups.seen + i * groups.n_tokens;
        int n = 0;
        for (int64_t token = groups.first; token < groups.first + groups.n_tokens; token++) {
            if (!seen[token - groups.first]) continue;
            const int64_t last = std::min(end, (token + 1) * shape.group);
            for (int64_t row = std::max(first, token * shape.group); row < last; row++) take(n++, row - first);
        }
        return n;
    }

    const uint8_t * cells(const ggml::Tensor * of, int64_t group) const {
        return reinterpret_cast<const uint8_t *>(at(of, kCells * group, head, stream));
    }

    // Whether the kernels read a group of cells where it lies.
    static bool is_direct(const ggml::Tensor * of, int n_rows, int n_in) {
        return of->type == ggml::kF16 && n_rows <= kernels->few && n_in == kCells;
    }

    // The next cells that this thread needs: of the next head or the next group.
    Next next(const ggml::Tensor * of, const Groups & groups, int64_t i, bool has_more_heads) const {
        const size_t n_bytes = of->type == ggml::kQ8_0 ? of->ne[0] / 32 * 34 : 2 * of->ne[0];
        if (has_more_heads) return {cells(of, groups.numbers[i]) + of->nb[2], of->nb[1], n_bytes};
        if (i + 1 == groups.n) return {};
        const int64_t n_before = shape.is_shared() ? head : 0;
        return {cells(of, groups.numbers[i + 1]) - n_before * of->nb[2], of->nb[1], n_bytes};
    }

    void score(const Groups & groups, int64_t i, bool has_more_heads = false) const {
        const int64_t group = groups.numbers[i], cell = kCells * group;
        const float * from[kMostShared];
        float * to[kMostShared];
        const int n = for_rows(groups, i, [&](int j, int64_t row) {
            from[j] = queries + row * shape.d_keys;
            to[j] = scores + row * shape.n_padded + cell;
        });
        const ggml::Tensor *keys = shape.keys, *values = shape.values;
        const int n_in = int(shape.n_in(group));
        const Next after = next(keys, groups, i, has_more_heads);
        if (is_direct(keys, n, n_in)) {
            kernels->scores_of_halves(n, from, cells(keys, group), keys->nb[1], int(shape.d_keys), to, after);
        } else {
            kernels->load(keys->type, scratch.cells, cells(keys, group), keys->nb[1], n_in, int(shape.d_keys));
            kernels->scores(n, from, scratch.cells, int(shape.d_keys), to, after);
        }
        kernels->largest(values->type, largest + cell, cells(values, group), values->nb[1], n_in, int(shape.d_values));
        std::fill(largest + cell + n_in, largest + cell + kCells, 0.0f);
    }

    // Turns the scores of a row into weights; returns the factor of its sums.
    float softmax(int64_t row) const {
        const int64_t query_head = head * shape.group + row % shape.group;
        const ggml::Tensor * sinks = shape.op->src[4];
        const Row of = {scores + (row - first) * shape.n_padded,
                        shape.mask_of(row / shape.group, stream),
                        largest,
                        shape.n_cells,
                        shape.slope(query_head),
                        shape.cap,
                        sinks ? static_cast<const float *>(sinks->data) + query_head : nullptr};
        return kernels->softmax(of, scratch.visible);
    }

    void clear_sums() const { std::fill(sums, sums + (end - first) * shape.d_values, 0); }

    void weigh(const Groups & groups, int64_t i, bool has_more_heads = false) const {
        const int64_t group = groups.numbers[i], cell = kCells * group;
        const float * weights[kMostShared];
        int32_t * to[kMostShared];
        const int n = for_rows(groups, i, [&](int j, int64_t row) {
            weights[j] = scores + row * shape.n_padded + cell;
            to[j] = sums + row * shape.d_values;
        });
        const ggml::Tensor * values = shape.values;
        const int n_in = int(shape.n_in(group));
        const Next after = next(values, groups, i, has_more_heads);
        const auto is_finite = [&](float size) { return size < std::numeric_limits<float>::infinity(); };
        if (is_direct(values, n, n_in) && std::all_of(largest + cell, largest + cell + kCells, is_finite)) {
            kernels->values_of_halves(n, weights, cells(values, group), values->nb[1], int(shape.d_values), to, after);
            return;
        }
        kernels->load(values->type, scratch.cells, cells(values, group), values->nb[1], n_in, int(shape.d_values));
        // A hidden cell has weight zero, which only hides finite values.
        for (int64_t j = 0; j < n_in; j++) {
            float * of = scratch.cells + j * shape.d_values;
            if (!is_finite(largest[cell + j])) std::fill(of, of + shape.d_values, 0.0f);
        }
        kernels->values(n, weights, scratch.cells, int(shape.d_values), to, after);
    }
};

struct Traits final : ggml::TensorTraits {
    bool work_size(int n_threads, const ggml::Tensor * op, size_t & size) override {
        const_cast<ggml::Tensor *>(op)->op_params[kMark] = is_used ? kMarked : 0;
        if (!is_used) return false;
        has_own = true;
        const Shape shape(op);
        Memory memory(nullptr);
        Shared(memory, shape, n_threads);
        for (int i = 0; i < n_threads; i++) Scratch(memory, shape);
        size = memory.size(nullptr) + kAlignment;
        return true;
    }

    bool compute_forward(ggml::ComputeParams * params, ggml::Tensor * op) override {
        if (op->op_params[kMark] != kMarked) return false;
        const Shape shape(op);
        const auto begin = reinterpret_cast<uintptr_t>(params->wdata);
        Memory memory(static_cast<char *>(params->wdata) + (up(begin, kAlignment) - int64_t(begin)));
        const Shared shared(memory, shape, params->nth);
        for (int i = 0; i < params->ith; i++) Scratch(memory, shape);
        const Scratch scratch(memory, shape);
        if (shape.is_shared()) share(params, shape, shared, scratch);
        else tile(params, shape, scratch);
        return true;
    }

private:
    static void finish(const Shape & shape, const int32_t * sums, float factor, float * to) {
        for (int64_t i = 0; i < shape.d_values; i++) to[i] = float(sums[i]) * factor;
    }

    // Each thread takes tiles of rows, and computes them over all cells.
    static void tile(ggml::ComputeParams * params, const Shape & shape, const Scratch & scratch) {
        const int64_t n_tiles = (shape.n_rows + kTile - 1) / kTile, n = shape.n_streams * shape.n_heads * n_tiles;
        if (params->ith == 0) ggml_functions.ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_functions.ggml_barrier(params->threadpool);
        for (int64_t i = params->ith; i < n; i = ggml_functions.ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t of = i / n_tiles, stream = of / shape.n_heads, first = i % n_tiles * kTile;
            const int64_t end = std::min(first + kTile, shape.n_rows);
            const Groups groups(shape, scratch, stream, first / shape.group, (end - 1) / shape.group + 1);
            const Part part{shape, scratch,         stream,         of % shape.n_heads, first,
                            end,   scratch.queries, scratch.scores, scratch.largest,    scratch.sums};
            part.load_queries();
            part.clear_sums();
            for (int64_t j = 0; j < groups.n; j++) part.score(groups, j);
            float factors[kTile];
            for (int64_t row = first; row < end; row++) factors[row - first] = part.softmax(row);
            for (int64_t j = 0; j < groups.n; j++) part.weigh(groups, j);
            for (int64_t row = first; row < end; row++) {
                finish(shape, part.sums + (row - first) * shape.d_values, factors[row - first],
                       shape.out(row, part.head, stream));
            }
        }
    }

    // Threads share the cells of all rows: scores, then weights, then each thread's sums, then their sum.
    static void share(ggml::ComputeParams * params, const Shape & shape, const Shared & shared, const Scratch & scratch) {
        const int64_t n_parts = shape.n_streams * shape.n_heads, n_rows = n_parts * shape.n_rows;
        const auto part_of = [&](int64_t i, int thread) {
            const int64_t row = i * shape.n_rows, head = i % shape.n_heads;
            return Part{shape,
                        scratch,
                        i / shape.n_heads,
                        head,
                        0,
                        shape.n_rows,
                        scratch.queries + head * shape.n_rows * shape.d_keys,
                        shared.scores + row * shape.n_padded,
                        shared.largest + i * shape.n_padded,
                        shared.sums + (thread * n_rows + row) * shape.d_values};
        };
        // This thread's share of the groups of cells. The heads come one after the other, as they lie in memory.
        const auto for_groups = [&](auto && begin_part, auto && function) {
            for (int64_t stream = 0; stream < shape.n_streams; stream++) {
                const Groups groups(shape, scratch, stream, 0, shape.n_tokens);
                for (int64_t i = 0; i < shape.n_heads; i++) begin_part(part_of(stream * shape.n_heads + i, params->ith));
                const int64_t begin = groups.n * params->ith / params->nth, end = groups.n * (params->ith + 1) / params->nth;
                for (int64_t j = begin; j < end; j++) {
                    for (int64_t i = 0; i < shape.n_heads; i++) {
                        function(part_of(stream * shape.n_heads + i, params->ith), groups, j, i + 1 < shape.n_heads);
                    }
                }
            }
        };
        for_groups([](const Part & part) { part.load_queries(); }, [](const Part & part, auto &&... of) { part.score(of...); });
        ggml_functions.ggml_barrier(params->threadpool);
        for (int64_t i = n_rows * params->ith / params->nth; i < n_rows * (params->ith + 1) / params->nth; i++) {
            shared.factors[i] = part_of(i / shape.n_rows, 0).softmax(i % shape.n_rows);
        }
        ggml_functions.ggml_barrier(params->threadpool);
        for_groups([](const Part & part) { part.clear_sums(); }, [](const Part & part, auto &&... of) { part.weigh(of...); });
        ggml_functions.ggml_barrier(params->threadpool);
        for (int64_t i = n_rows * params->ith / params->nth; i < n_rows * (params->ith + 1) / params->nth; i++) {
            int32_t * sums = shared.sums + i * shape.d_values;
            for (int thread = 1; thread < params->nth; thread++) {
                const int32_t * others = shared.sums + (thread * n_rows + i) * shape.d_values;
                // Without signs: sums of what is not finite overflow.
                for (int64_t j = 0; j < shape.d_values; j++) sums[j] = int32_t(uint32_t(sums[j]) + uint32_t(others[j]));
            }
            const int64_t part = i / shape.n_rows;
            finish(shape, sums, shared.factors[i], shape.out(i % shape.n_rows, part % shape.n_heads, part / shape.n_heads));
        }
    }
};

bool is_row(const ggml::Tensor * tensor, size_t n_bytes) { return tensor->nb[0] == n_bytes; }

bool has_code(const ggml::Tensor * cells) {
    const size_t n_bytes = cells->type == ggml::kQ8_0 ? 34 : 2;
    return kernels->supports(cells->type) && is_row(cells, n_bytes) &&
           cells->ne[0] % (cells->type == ggml::kQ8_0 ? 32 : 16) == 0 && cells->ne[0] <= kMostValues;
}

}  // namespace

bool is_visible(const uint16_t * mask, int64_t n) {
    constexpr uint16_t hidden = 0xfc00;
    bool found = false;
    if (n == kCells) {
        for (int64_t j = 0; j < kCells; j++) found |= mask[j] != hidden;
    } else {
        for (int64_t j = 0; j < n; j++) found |= mask[j] != hidden;
    }
    return found;
}

void set_kernels(const ggml::Functions & functions, const Kernels * chosen) { ggml_functions = functions, kernels = chosen; }

bool use(bool whether) {
    const bool was = is_used;
    is_used = whether;
    has_own = has_other = false;
    return was;
}

bool computed_all() { return has_own && !has_other; }

ggml::TensorTraits * traits_of(const ggml::Tensor * op) {
    static Traits & traits = *new Traits;  // never freed, since ggml's threads use it
    if (op->op != ggml::kFlashAttnExt || kernels == nullptr) return nullptr;
    const ggml::Tensor *queries = op->src[0], *keys = op->src[1], *values = op->src[2], *mask = op->src[3];
    const bool fits = queries->type == ggml::kF32 && is_row(queries, sizeof(float)) && is_row(op, sizeof(float)) &&
                      has_code(keys) && has_code(values) && keys->ne[1] <= kMostCells && keys->ne[2] == values->ne[2] &&
                      queries->ne[2] % keys->ne[2] == 0 && keys->ne[3] == queries->ne[3] && values->ne[3] == queries->ne[3];
    const bool is_masked = mask == nullptr || (mask->type == ggml::kF16 && mask->ne[2] == 1 && is_row(mask, sizeof(uint16_t)));
    if (fits && is_masked) return &traits;
    has_other = true;
    return nullptr;
}

}  // namespace ggufspec::attention
