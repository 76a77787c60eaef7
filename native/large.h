// Finds the large logits of a row: reads the whole row once, and then only small parts of it.
#pragma once

#include <cstddef>
#include <vector>

#include "chain.h"
#include "kernels.h"

namespace ggufspec {

// The largest values of the lanes of a row (see kernels.h).
class Lanes {
public:
    void read(const float * row, size_t n, size_t depth);

    // Calls found(i) for each value of a lane that reaches the bound, with its place in the row.
    template <typename Found>
    void each_in(size_t lane, float bound, const Found & found) const {
        const size_t begin = lane / kLanes * kLanes * depth_ + lane % kLanes;
        for (size_t i = begin; i < n_ && i < begin + kLanes * depth_; i += kLanes) {
            if (row_[i] >= bound) found(i);
        }
    }

    const std::vector<float> & largest() const { return largest_; }

private:
    const float * row_ = nullptr;
    size_t n_ = 0, depth_ = 1;
    std::vector<float> largest_;
};

// The lanes of a row of logits, and the lanes of those. The row must outlive all queries.
class Large {
public:
    void read(const float * row, size_t n);

    float largest() const { return largest_; }

    // A logit that at least k tokens reach, not much below the k-th largest: k lanes have such a token.
    float reached_by(size_t k);

    // The tokens whose logits reach the bound, in any order.
    void gather(float bound, std::vector<Candidate> & list) const;

private:
    const float * row_ = nullptr;
    float largest_ = 0;
    Lanes lower_, upper_;
    std::vector<float> ranked_;
};

}  // namespace ggufspec
