#include "large.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace ggufspec {

void Lanes::read(const float * row, size_t n, size_t depth) {
    row_ = row;
    n_ = n;
    depth_ = depth;
    largest_.resize((n + kLanes * depth - 1) / (kLanes * depth) * kLanes);
    kernels.largest_of_lanes(row, n, depth, largest_.data());
}

void Large::read(const float * row, size_t n) {
    row_ = row;
    lower_.read(row, n, std::clamp<size_t>(n / 4096, 1, 16));
    upper_.read(lower_.largest().data(), lower_.largest().size(), 32);
    largest_ = kernels.largest_of(upper_.largest().data(), upper_.largest().size());
}

float Large::reached_by(size_t k) {
    ranked_ = upper_.largest().size() > 2 * k ? upper_.largest() : lower_.largest();
    if (ranked_.size() <= k) return std::numeric_limits<float>::lowest();
    std::nth_element(ranked_.begin(), ranked_.begin() + (k - 1), ranked_.end(), std::greater<float>());
    return std::max(ranked_[k - 1], std::numeric_limits<float>::lowest());
}

void Large::gather(float bound, std::vector<Candidate> & list) const {
    list.clear();
    const auto add = [this, &list](size_t i) { list.push_back({static_cast<int32_t>(i), row_[i], 0}); };
    for (size_t lane = 0; lane < upper_.largest().size(); lane++) {
        if (!(upper_.largest()[lane] >= bound)) continue;
        upper_.each_in(lane, bound, [&](size_t lower) { lower_.each_in(lower, bound, add); });
    }
}

}  // namespace ggufspec
