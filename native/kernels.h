// Loops over rows of floats, in a shape that compilers vectorise. Knows numbers only.
#pragma once

#include <cstddef>

namespace ggufspec {

// A row of logits as a distribution: p(x) = 2^((logits[x] - largest) * rate) * scale.
struct Softmax {
    const float * logits;
    float largest;
    float rate;  // log2(e) / temperature
    float scale;
};

// The largest value, NaN passed over; -infinity if there is none.
float largest_of(const float * values, size_t n);

// The largest value of each run of n_block values, the last run being shorter where it must: (n / n_block, rounded up).
void largest_of_blocks(const float * values, size_t n, size_t n_block, float * largest);

// The sum of p over the tokens from `begin` to `end`. A NaN or -infinity has no weight.
double weight_of(const Softmax & row, size_t begin, size_t end);

// p of the tokens from `begin` to `end`.
void weights_of(const Softmax & row, size_t begin, size_t end, float * weights);

// The sum of min(factor * target, draft) over the tokens from `begin` to `end`.
double overlap_of(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end);

// The sum of max(factor * target - draft, 0) over the tokens from `begin` to `end`.
double excess_of(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end);

}  // namespace ggufspec
