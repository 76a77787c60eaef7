#include "kernels.h"

#include <cstdint>
#include <cstring>

// This file is compiled once for each instruction set (CMakeLists.txt), and dispatch.cpp chooses. It must not call inline
// functions of the standard library: the linker keeps only one copy of them, which may have instructions that this
// processor lacks.
#ifndef GGUFSPEC_KERNELS
#define GGUFSPEC_KERNELS baseline
#define GGUFSPEC_INSTRUCTIONS "baseline"
#endif
#ifdef __GNUC__
#define GGUFSPEC_INLINE inline __attribute__((always_inline))
#else
#define GGUFSPEC_INLINE inline
#endif

namespace ggufspec {
namespace {

// 2^x for x <= 0, with a relative error of about 2e-7; 0 below 2^-126 and for NaN. Computed as 2^n times a polynomial in
// x - n, which is in [-1/2, 1/2]; the polynomial has the least relative error (8e-8).
GGUFSPEC_INLINE float exp2_of(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float safe = x > -126.0f ? x : -126.0f;
    const float rounded = safe + kRound;
    const float f = safe - (rounded - kRound);
    float series = 0.00132765f;
    series = series * f + 0.00967554f;
    series = series * f + 0.05550713f;
    series = series * f + 0.2402212f;
    series = series * f + 0.69314697f;
    series = series * f + 1.00000007f;
    int32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    bits = static_cast<int32_t>(static_cast<uint32_t>(bits) << 23) + 0x3f800000;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x > -126.0f ? series * power : 0.0f;
}

GGUFSPEC_INLINE float prob_of(const Softmax & row, size_t i) {
    return exp2_of((row.logits[i] - row.largest) * row.rate) * row.scale;
}

GGUFSPEC_INLINE float least(float a, float b) { return a < b ? a : b; }
GGUFSPEC_INLINE float excess(float a, float b) { return a > b ? a - b : 0.0f; }

// Adds up value(i) for i from begin to end.
template <typename Value>
GGUFSPEC_INLINE double sum_over(size_t begin, size_t end, const Value & value) {
    float lanes[kLanes] = {};
    size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; lane++) lanes[lane] += value(i + lane);
    }
    double sum = 0;
    for (; i < end; i++) sum += value(i);
    for (const float lane : lanes) sum += lane;
    return sum;
}

int32_t only_index_of(const float * values, size_t n, float value) {
    const int32_t end = int32_t(n);
    int32_t n_found = 0, index = 0;
    for (int32_t i = 0; i < end; i++) {
        n_found += values[i] == value ? 1 : 0;
        index |= values[i] == value ? i : 0;
    }
    return n_found == 1 ? index : -1;
}

float largest_of(const float * values, size_t n) {
    float lanes[kLanes];
    for (size_t lane = 0; lane < kLanes; lane++) lanes[lane] = kNever;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; lane++) {
            lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
        }
    }
    for (; i < n; i++) lanes[0] = values[i] > lanes[0] ? values[i] : lanes[0];
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; lane++) {
            lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
        }
    }
    return lanes[0];
}

float gap_of(const float * values, size_t n) {
    float first[kLanes], second[kLanes];
    for (size_t lane = 0; lane < kLanes; lane++) first[lane] = second[lane] = kNever;
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (size_t lane = 0; lane < kLanes; lane++) {
            const float value = values[i + lane];
            const float loser = value > first[lane] ? first[lane] : value;
            second[lane] = loser > second[lane] ? loser : second[lane];
            first[lane] = value > first[lane] ? value : first[lane];
        }
    }
    float largest = kNever, next = kNever;
    const auto meet = [&](float value) {
        const float loser = value > largest ? largest : value;
        next = loser > next ? loser : next;
        largest = value > largest ? value : largest;
    };
    for (size_t lane = 0; lane < kLanes; lane++) meet(first[lane]);
    for (size_t lane = 0; lane < kLanes; lane++) meet(second[lane]);
    for (; i < n; i++) meet(values[i]);
    return next > kNever ? largest - next : -kNever;
}

void largest_of_lanes(const float * values, size_t n, size_t depth, float * largest) {
    for (size_t begin = 0; begin < n; begin += kLanes * depth, largest += kLanes) {
        float lanes[kLanes];
        for (size_t lane = 0; lane < kLanes; lane++) lanes[lane] = kNever;
        const size_t end = begin + kLanes * depth < n ? begin + kLanes * depth : n;
        size_t i = begin;
        for (; i + kLanes <= end; i += kLanes) {
            for (size_t lane = 0; lane < kLanes; lane++) {
                lanes[lane] = values[i + lane] > lanes[lane] ? values[i + lane] : lanes[lane];
            }
        }
        for (size_t lane = 0; i < end; i++, lane++) lanes[lane] = values[i] > lanes[lane] ? values[i] : lanes[lane];
        for (size_t lane = 0; lane < kLanes; lane++) largest[lane] = lanes[lane];
    }
}

double weight_of(const Softmax & row, size_t begin, size_t end) {
    const Softmax bare{row.logits, row.largest, row.rate, 1.0f};
    return row.scale * sum_over(begin, end, [&bare](size_t i) { return prob_of(bare, i); });
}

Moments moments_of(const Softmax & row, size_t begin, size_t end) {
    constexpr size_t kFew = kLanes / 4;  // three sums each
    constexpr float kFarthest = 1e30f;  // 0 * infinity is NaN
    const Softmax bare{row.logits, row.largest, row.rate, 1.0f};
    float weights[kFew] = {}, excesses[kFew] = {}, counts[kFew] = {};
    const auto add = [&](size_t i, size_t lane) {
        const float weight = prob_of(bare, i), distance = bare.largest - bare.logits[i];
        weights[lane] += weight;
        excesses[lane] += weight * (distance < kFarthest ? distance : kFarthest);
        counts[lane] += bare.logits[i] > kNever ? 1.0f : 0.0f;
    };
    size_t i = begin;
    for (; i + kFew <= end; i += kFew) {
        for (size_t lane = 0; lane < kFew; lane++) add(i + lane, lane);
    }
    for (; i < end; i++) add(i, 0);
    Moments found{};
    double n = 0;
    for (size_t lane = 0; lane < kFew; lane++) {
        found.weight += weights[lane];
        found.excess += excesses[lane];
        n += counts[lane];
    }
    found.n = static_cast<size_t>(n);
    return found;
}

void weights_of(const Softmax & row, size_t begin, size_t end, float * weights) {
    const Softmax copy = row;
    for (size_t i = begin; i < end; i++) weights[i - begin] = prob_of(copy, i);
}

double overlap_of(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end) {
    const Softmax a{target.logits, target.largest, target.rate, factor * target.scale}, b = draft;
    return sum_over(begin, end, [&a, &b](size_t i) { return least(prob_of(a, i), prob_of(b, i)); });
}

double excess_of(const Softmax & target, float factor, const Softmax & draft, size_t begin, size_t end) {
    const Softmax a{target.logits, target.largest, target.rate, factor * target.scale}, b = draft;
    return sum_over(begin, end, [&a, &b](size_t i) { return excess(prob_of(a, i), prob_of(b, i)); });
}

}  // namespace

extern const Kernels GGUFSPEC_KERNELS;
constexpr Kernels GGUFSPEC_KERNELS = {
    GGUFSPEC_INSTRUCTIONS,
    largest_of,
    only_index_of,
    gap_of,
    largest_of_lanes,
    weight_of,
    moments_of,
    weights_of,
    overlap_of,
    excess_of,
};

}  // namespace ggufspec
