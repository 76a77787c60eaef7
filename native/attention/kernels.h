// Attention over a cache of keys and values: the kernels of each instruction set.
//
// What a row of queries gets depends, bit for bit, on that row and on the set of the cells that it sees, and on nothing else:
// not on other rows, on the order or the places of cells, on hidden cells, threads, or the pieces in which a text was read.
//   - A score is a dot product of one row and one cell; the largest score of a row is known before any weight is computed.
//   - Sums over cells are exact, so their order has no influence. Each weight is multiplied by a power of two such that the
//     sizes of all products of kCells cells have a sum below 2^22. A sum over these starts at 1.5 * 2^23, between 2^23 and 2^24,
//     where floats are whole numbers. So a fused multiply-add to it rounds the product to a whole number, and adds without
//     another error; larger sums are integers. The rounding is the same wherever the sum stands: only a product that ends in
//     one half could go either way, and there is none below 2^22, since weights are odd (see `softmax`).
//   - The power of two, and the sum of the weights, come from sums of integers over the cells that the row sees.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ggufspec::attention {

constexpr int kCells = 32;  // cells at a time

// kCells rows in the cache that are needed soon: reading them begins while others are computed. from: may be null.
struct Next {
    const uint8_t * from;
    size_t stride, n_bytes;
};

// A row of scores over all cells; `softmax` turns scores into weights.
struct Row {
    float * scores;           // those of hidden cells may be anything
    const uint16_t * mask;    // f16; null: all cells are visible
    const float * largest;    // of each cell: no value in it is larger
    int64_t n_cells;
    float slope, cap;         // the factor of the mask; the limit of scores, 0 if there is none: scores are divided by it
    const float * sink;       // a score without a cell, or null
};

struct Kernels {
    const char * name;
    int width;  // lanes of a register; head sizes are multiples of 16
    int few;    // rows up to which converting cells once per call is faster than loading them before

    // Whether there is code for this type of cache (enum ggml_type).
    bool (*supports)(int type);

    // to[i * d]: `n` rows of d values in the cache, as floats; zeros for the others of kCells.
    void (*load)(int type, float * to, const uint8_t * from, size_t stride, int n, int d);

    // The largest absolute value of each of n rows in the cache, or somewhat more; infinite where a value is not finite.
    void (*largest)(int type, float * to, const uint8_t * from, size_t stride, int n, int d);

    // to[i][j] = the product of row i and cell j, for n rows and kCells cells.
    void (*scores)(int n, const float * const * rows, const float * keys, int d, float * const * to, const Next & next);

    // The same with kCells keys as they lie in an f16 cache, for few rows: see `few`.
    void (*scores_of_halves)(int n, const float * const * rows, const uint8_t * keys, size_t stride, int d, float * const * to,
                             const Next & next);

    // Turns the scores of all visible groups of kCells cells into weights, and returns the factor of the sum of the weighted
    // values; NaN if a visible cell or the row has values that are not finite. visible: room for the numbers of these groups.
    float (*softmax)(const Row & row, int32_t * visible);

    // sums[i][.] += weights[i][j] * values of cell j, for n rows and kCells cells.
    void (*values)(int n, const float * const * weights, const float * values, int d, int32_t * const * sums, const Next & next);
    void (*values_of_halves)(int n, const float * const * weights, const uint8_t * values, size_t stride, int d,
                             int32_t * const * sums, const Next & next);
};

// Whether a row sees one of its n <= kCells cells from this place of its mask on.
bool is_visible(const uint16_t * mask, int64_t n);

// The fastest kernels for an instruction set of the products; null if there are none.
const Kernels * find_kernels(const char * instructions);

}  // namespace ggufspec::attention
