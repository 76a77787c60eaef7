// Products of quantized weights with a few rows of activations: what each instruction set offers for each type of weights.
//
// Weights are packed anew when a model is loaded: `width` rows are interleaved in groups of four consecutive values, so that
// one register holds four values of `width` rows, and four values of an activation row are broadcast to it. They are unpacked
// once for all rows of activations of a pass. The result of a row does not depend, bit for bit, on the rows beside it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ggufspec::matmul {

constexpr int kBlock = 32;  // values with one scale in a row of activations

// 32 values of a row of activations, as int8 times `scale`; for types that hold floats: the values themselves.
struct Activations {
    float scale;
    union {
        int32_t start[2];  // minus the sum of either half's values times the offset of the weights; for whole blocks: the first
        float minus[2];  // for types with minima: minus the sum of either half's (or all) values times `scale`
    };
    int8_t values[kBlock];
};

// One type of weights. `from`: rows in ggml's layout, of `n_super` blocks of `n_values` values.
struct Kernel {
    const char * name;  // as ggml names the type
    int type;  // enum ggml_type
    int n_values;  // of a block of the file
    size_t file_bytes;  // of such a block
    size_t packed_bytes;  // of `width` such blocks; the last rows of a tensor are filled up with zeros
    size_t active_bytes;  // of n_values values of a row of activations

    // Packs the rows of the groups from `begin` to `end`, of n_rows in all.
    void (*pack)(uint8_t * to, const uint8_t * from, int64_t n_super, int64_t n_rows, int64_t begin, int64_t end);

    // Converts the blocks from `begin` to `end` of a row of floats.
    void (*convert)(void * to, const float * from, int64_t begin, int64_t end);

    // out[i][row] for n <= most rows of activations, and the weights of the groups from `begin` to `end`.
    void (*multiply)(int n, const uint8_t * weights, const void * const * rows, float * const * out, int64_t n_super,
                     int64_t n_rows, int64_t begin, int64_t end);
};

struct Instructions {
    const char * name;
    bool (*supported)();  // by this processor
    int width;  // rows of weights that are interleaved
    int most;  // rows of activations that one call of multiply takes
    const Kernel * kernels;
    size_t n_kernels;
};

// Those that this was compiled for, the fastest first.
extern const Instructions * const kInstructions[];
extern const size_t kNumInstructions;

// Those of a name; null if there are none, or this processor does not have them.
const Instructions * find_instructions(const char * name);

const Kernel * find_kernel(const Instructions & instructions, int type);

}  // namespace ggufspec::matmul
