// Products of quantized weights with a few rows of activations: the kernels of each instruction set for each type of weights.
//
// Weights are repacked when a model is loaded: `width` rows are interleaved in groups of four consecutive values, so that
// one register holds four values of `width` rows, and four values of an activation row are broadcast to it. They are unpacked
// once for all rows of activations of a pass. The result of a row does not depend, bit for bit, on the other rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ggufspec::matmul {

constexpr int kBlock = 32;  // values with one scale in a row of activations

// 32 values of a row of activations, as int8 times `scale`; for types that hold floats: the values themselves.
struct Activations {
    float scale;
    union {
        // A correction for each half of the block, or [0] for the whole block.
        int32_t start[2];  // -(sum of values) * (offset of the weights): the products are added to it
        float minus[2];    // for types with minima instead: -(sum of values) * scale
    };
    int8_t values[kBlock];
};

// One type of weights. `from`: rows in ggml's layout, of `n_super` blocks of `n_values` values.
struct Kernel {
    const char * name;     // as ggml names the type
    int type;              // enum ggml_type
    int n_values;          // values in a block of the file
    size_t file_bytes;     // bytes of such a block
    size_t packed_bytes;   // bytes of `width` such blocks; the last rows of a tensor are padded with zeros
    size_t active_bytes;   // bytes of n_values values of a row of activations

    // Packs the rows of the groups from `begin` to `end`; the tensor has n_rows in total.
    void (*pack)(uint8_t * to, const uint8_t * from, int64_t n_super, int64_t n_rows, int64_t begin, int64_t end);

    // Converts the blocks from `begin` to `end` of a row of floats.
    void (*convert)(void * to, const float * from, int64_t begin, int64_t end);

    // Computes out[i][row] for n rows of activations, at most `most`, and the weights of the groups from `begin` to `end`.
    void (*multiply)(int n, const uint8_t * weights, const void * const * rows, float * const * out, int64_t n_super,
                     int64_t n_rows, int64_t begin, int64_t end);
};

struct Instructions {
    const char * name;
    int width;            // number of interleaved rows of weights
    int most;             // maximum rows of activations in a call of multiply
    const Kernel * kernels;
    size_t n_kernels;
};

// The instruction sets of this processor for which the extension was compiled, the fastest first.
std::vector<const Instructions *> supported_instructions();

// The instruction set of this name; null if it is unknown, or this processor does not have it.
const Instructions * find_instructions(const char * name);

const Kernel * find_kernel(const Instructions & instructions, int type);

}  // namespace ggufspec::matmul
