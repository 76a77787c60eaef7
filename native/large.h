// Finds the large logits of a row: reads the whole row once, then only small parts of it.
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

    // Calls found(i) for each value of a lane that is at least `bound`; i is its index in the row.
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

// Lanes of a row of logits, and lanes of the largest values of these lanes. The row must outlive all queries.
class Large {
public:
    void read(const float * row, size_t n);

    float largest() const { return largest_; }

    // A bound, close below the k-th largest logit, that at least k tokens reach: one in each of k lanes.
    float reached_by(size_t k);

    // Appends the tokens whose logits are at least `bound`, in any order.
    void gather(float bound, std::vector<Candidate> & list) const;

private:
    const float * row_ = nullptr;
    float largest_ = 0;
    Lanes lower_, upper_;
    std::vector<float> ranked_;
};

}  // namespace ggufspec
