// Loops over rows of floats, written so that compilers vectorise them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace ggufspec {

constexpr float kNever = -std::numeric_limits<float>::infinity();  // the logit of a token that is never drawn
constexpr float kLog2E = 1.44269504f;

// A row of logits as a distribution: p(x) = 2^((logits[x] - largest) * rate) * scale.
struct Softmax {
    const float * logits;
    float largest;
    float rate;  // log2(e) / temperature
    float scale;
};

// The entropy of a distribution p(x) = w(x) / sum of w, w(x) = e^-d(x), is log(weight) + excess / weight.
struct Moments {
    double weight;  // sum of w
    double excess;  // sum of w * d
    size_t n;
};

constexpr size_t kLanes = 64;  // independent accumulators: they fill four of the widest vectors

// The loops, compiled for the vectors of one instruction set.
struct Kernels {
    const char * instructions;

    // The largest value, NaN ignored; -infinity if there is none.
    float (*largest_of)(const float * values, size_t n);

    // The index of the only occurrence of `value`; -1 if there are more, or none.
    int32_t (*only_index_of)(const float * values, size_t n, float value);

    // The difference of the largest and the second largest value; infinity if there is no second value.
    float (*gap_of)(const float * values, size_t n);

    // The largest value of each lane. The row is cut into pieces of kLanes * depth values (the last piece is padded with
    // -infinity); lane j of piece i has the values at i * kLanes * depth + j, + kLanes, + 2 * kLanes ...
    void (*largest_of_lanes)(const float * values, size_t n, size_t depth, float * largest);

    // The sum of p over the tokens from `begin` to `end`. A NaN or -infinity has no weight.
    double (*weight_of)(const Softmax & row, size_t begin, size_t end);

    // The entropy's two sums, and the number of tokens above -infinity, from `begin` to `end`.
    Moments (*moments_of)(const Softmax & row, size_t begin, size_t end);

    // p of the tokens from `begin` to `end`.
    void (*weights_of)(const Softmax & row, size_t begin, size_t end, float * weights);

    // The sum of min(factor * target, draft) over the tokens from `begin` to `end`.
    double (*overlap_of)(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end);

    // The sum of max(factor * target - draft, 0) over the tokens from `begin` to `end`.
    double (*excess_of)(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end);
};

// The fastest kernels for this processor. The environment variable GGUFSPEC_INSTRUCTIONS names others, for tests.
extern const Kernels & kernels;

}  // namespace ggufspec
