// The kernels as templates over an instruction set. The file of each instruction set includes this, and is compiled with its
// flags. So all functions here and below are in an unnamed namespace, and none is of the standard library: of functions that
// several files share, the linker keeps one copy, which may have instructions that this processor lacks.
//
// Isa has: kName, kWidth (lanes of a register), kRows (rows of scores at a time, with four cells each), kSums (registers of
// sums of values), Floats, Ints, Choice, and the operations used below.
#pragma once

#include <cstring>
#include <utility>

#include "../ggml_abi.h"
#include "kernels.h"

namespace ggufspec::attention {
namespace {

constexpr float kStart = 1.5f * (1 << 23), kLimit = 1 << 22, kTotalLimit = 1 << 30;  // of sums: see kernels.h
constexpr float kInfinity = __builtin_inff();
constexpr uint16_t kHidden = 0xfc00;  // -infinity as f16
constexpr int kBlock = 32, kBlockBytes = 34;  // of q8_0: values with one scale
constexpr float kLeastPower = -60;  // of e, of a weight that is not zero
constexpr int kUnit = 24;  // weights are summed in units of 2^-kUnit
// Exponents of the largest value of a row's cells: beyond these, powers of two would leave the range of floats. Larger values
// count as infinite, smaller ones as 2^kLeastValues.
constexpr int kMostValues = 96, kLeastValues = -40;
constexpr int kLeastShift = -30, kMostShift = 30;

bool sees(const uint16_t * mask, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        if (mask[j] != kHidden) return true;
    }
    return false;
}

// Whether kCells cells are visible and have no bias.
bool is_plain(const uint16_t * mask) {
    if (mask == nullptr) return true;
    uint64_t any = 0;
    for (int i = 0; i < kCells; i += 4) {
        uint64_t four;
        std::memcpy(&four, mask + i, sizeof(four));
        any |= four;
    }
    return any == 0;
}

bool supports(int type) { return type == ggml::kF16 || type == ggml::kBF16 || type == ggml::kQ8_0; }

float power(int exponent) {
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    float found;
    std::memcpy(&found, &bits, sizeof(found));
    return found;
}

// 2^exponent is larger than x, which is not negative.
int exponent_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const int found = int(bits >> 23) - 126;
    return found < kLeastValues ? kLeastValues : found;
}

template <class Isa>
float half(const uint8_t * from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return Isa::half(bits);
}

template <class Isa>
void load(int type, float * to, const uint8_t * from, size_t stride, int n, int d) {
    constexpr int width = Isa::kWidth;
    for (int j = 0; j < n; j++, from += stride, to += d) {
        if (type == ggml::kF16) {
            for (int i = 0; i < d; i += width) Isa::store(to + i, Isa::halves(from + 2 * i));
        } else if (type == ggml::kBF16) {
            for (int i = 0; i < d; i += width) Isa::store(to + i, Isa::brains(from + 2 * i));
        } else {
            for (int block = 0; block < d / kBlock; block++) {
                const uint8_t * at = from + kBlockBytes * block;
                const auto scale = Isa::all(half<Isa>(at));
                for (int i = 0; i < kBlock; i += width) {
                    Isa::store(to + kBlock * block + i, Isa::multiply(scale, Isa::bytes(at + 2 + i)));
                }
            }
        }
    }
    for (int i = 0; i < (kCells - n) * d; i += width) Isa::store(to + i, Isa::all(0));
}

template <class Isa>
void largest(int type, float * to, const uint8_t * from, size_t stride, int n, int d) {
    for (int j = 0; j < n; j++, from += stride) {
        float most = 0;
        if (type == ggml::kQ8_0) {
            for (int block = 0; block < d / kBlock; block++) {
                const float scale = half<Isa>(from + kBlockBytes * block), size = 128 * (scale < 0 ? -scale : scale);
                if (most == most && !(size <= most)) most = size;  // NaN stays
            }
        } else {
            for (int i = 0; i < d; i += kCells) __builtin_prefetch(from + kCells * stride + 2 * i);
            const uint16_t bits = Isa::most(from, d);
            const uint32_t wide = uint32_t(bits) << 16;
            if (type == ggml::kF16) most = Isa::half(bits);
            else std::memcpy(&most, &wide, sizeof(most));
        }
        to[j] = most < power(kMostValues) ? most : kInfinity;
    }
}

void prefetch(const Next & next, int begin, int end) {
    if (next.from == nullptr) return;
    for (int j = begin; j < end; j++) {
        for (size_t i = 0; i < next.n_bytes; i += 64) __builtin_prefetch(next.from + j * next.stride + i);
    }
}

// kCells rows of the cache, loaded before or as they lie in it.
template <class Isa>
struct Loaded {
    const float * from;
    size_t stride;
    typename Isa::Floats at(int j, int i) const { return Isa::load(from + j * stride + i); }
};

template <class Isa>
struct Halves {
    const uint8_t * from;
    size_t stride;
    typename Isa::Floats at(int j, int i) const { return Isa::halves(from + j * stride + 2 * i); }
};

// A few rows, and all cells in steps of `Cells`, a multiple of four. The lanes of a register are summed in a fixed order.
template <class Isa, int N, int Cells, class Source>
void score(const float * const * rows, const Source & keys, int d, float * const * to, const Next & next) {
    constexpr int width = Isa::kWidth;
    for (int first = 0; first < kCells; first += Cells) {
        prefetch(next, first, first + Cells);
        typename Isa::Floats sums[N][Cells];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < Cells; j++) sums[i][j] = Isa::all(0);
        }
        for (int at = 0; at < d; at += width) {
            typename Isa::Floats row[N];
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) row[i] = Isa::load(rows[i] + at);
#pragma GCC unroll 8
            for (int j = 0; j < Cells; j++) {
                const auto key = keys.at(first + j, at);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) sums[i][j] = Isa::add(sums[i][j], row[i], key);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < Cells; j += 4) Isa::reduce(to[i] + first + j, sums[i] + j);
        }
    }
}

template <class Isa, class Source, int... N>
void scores(int n, const float * const * rows, const Source & keys, int d, float * const * to, const Next & next,
            std::integer_sequence<int, N...>) {
    const int n_calls = (n + Isa::kRows - 1) / Isa::kRows;
    for (int call = 0; call < n_calls; call++) {
        const int first = n * call / n_calls, size = n * (call + 1) / n_calls - first;
        const Next once = call == 0 ? next : Next{};
        ((size == N + 1 ? score<Isa, N + 1, N == 0 ? 8 : 4>(rows + first, keys, d, to + first, once) : void()), ...);
    }
}

template <class Isa>
void scores_of(int n, const float * const * rows, const float * keys, int d, float * const * to, const Next & next) {
    scores<Isa>(n, rows, Loaded<Isa>{keys, size_t(d)}, d, to, next, std::make_integer_sequence<int, Isa::kRows>{});
}

template <class Isa>
void scores_of_halves(int n, const float * const * rows, const uint8_t * keys, size_t stride, int d, float * const * to,
                      const Next & next) {
    scores<Isa>(n, rows, Halves<Isa>{keys, stride}, d, to, next, std::make_integer_sequence<int, Isa::kRows>{});
}

// e^x for x <= 0, with its last bit set; 0 below kLeastPower; NaN for NaN.
template <class Isa>
typename Isa::Floats exponential(typename Isa::Floats x) {
    const auto y = Isa::larger(Isa::all(kLeastPower), x), n = Isa::rounded(Isa::multiply(y, Isa::all(1.44269504f)));
    const auto r = Isa::add(Isa::add(y, n, Isa::all(-0.693359375f)), n, Isa::all(2.12194440e-4f));
    auto p = Isa::all(1.9875691500e-4f);
    constexpr float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (const float factor : factors) p = Isa::add(Isa::all(factor), p, r);
    p = Isa::add(Isa::plus(r, Isa::all(1)), p, Isa::multiply(r, r));
    return Isa::choose(Isa::is_less(x, Isa::all(kLeastPower)), Isa::all(0), Isa::odd(Isa::multiply(p, Isa::powers(n))));
}

template <class Isa>
typename Isa::Floats capped(typename Isa::Floats x, float cap) {
    const auto zero = Isa::all(0), size = Isa::larger(x, Isa::minus(zero, x));
    const auto e = exponential<Isa>(Isa::multiply(size, Isa::all(-2)));
    const auto tanh = Isa::multiply(Isa::divide(Isa::minus(Isa::all(1), e), Isa::plus(Isa::all(1), e)), Isa::all(cap));
    return Isa::choose(Isa::is_less(x, zero), Isa::minus(zero, tanh), tanh);
}

// Sums of whole numbers of up to 2^25 in each lane.
template <class Isa>
struct Count {
    int64_t total = 0;
    typename Isa::Ints lanes = Isa::no_ints();
    void flush() {
        total += Isa::total(lanes);
        lanes = Isa::no_ints();
    }
};

template <class Isa>
float softmax(const Row & row, int32_t * visible) {
    constexpr int width = Isa::kWidth;
    using Floats = typename Isa::Floats;
    const Floats hidden = Isa::all(-kInfinity);
    Floats top = hidden, most = Isa::all(0), n_seen = Isa::all(0);
    int32_t n_groups = 0;
    int64_t n_plain = 0;  // cells of groups that are visible and have no bias
    for (int64_t first = 0; first < row.n_cells; first += kCells) {
        const int64_t n = row.n_cells - first;
        const uint16_t * mask = row.mask ? row.mask + first : nullptr;
        if (mask && !sees(mask, n < kCells ? n : kCells)) continue;
        visible[n_groups++] = int32_t(first / kCells);
        if (n >= kCells && row.cap == 0 && is_plain(mask)) {
            for (int j = 0; j < kCells; j += width) {
                top = Isa::larger(Isa::load(row.scores + first + j), top);
                most = Isa::larger(most, Isa::load(row.largest + first + j));
            }
            n_plain += kCells;
            continue;
        }
        uint16_t bits[kCells];
        for (int64_t j = 0; j < kCells; j++) bits[j] = j >= n ? kHidden : mask ? mask[j] : 0;
        for (int j = 0; j < kCells; j += width) {
            float * at = row.scores + first + j;
            Floats x = Isa::load(at);
            if (row.cap != 0) x = capped<Isa>(x, row.cap);
            const Floats bias = Isa::halves(reinterpret_cast<const uint8_t *>(bits + j));
            const auto is_hidden = Isa::is_less(bias, Isa::all(-65504.0f));
            x = Isa::choose(is_hidden, hidden, Isa::add(x, bias, Isa::all(row.slope)));
            Isa::store(at, x);
            top = Isa::larger(x, top);
            most = Isa::larger(most, Isa::choose(is_hidden, Isa::all(0), Isa::load(row.largest + first + j)));
            n_seen = Isa::plus(n_seen, Isa::choose(is_hidden, Isa::all(0), Isa::all(1)));
        }
    }
    float lanes[3][width];
    Isa::store(lanes[0], top), Isa::store(lanes[1], most), Isa::store(lanes[2], n_seen);
    float peak = -kInfinity, size = 0, n_all = float(n_plain);
    for (int i = 0; i < width; i++) {
        if (lanes[0][i] > peak) peak = lanes[0][i];
        if (lanes[1][i] > size) size = lanes[1][i];
        n_all += lanes[2][i];
    }
    if (n_groups == 0) return 0;
    if (!(size < kInfinity)) return __builtin_nanf("");
    if (row.sink && *row.sink > peak) peak = *row.sink;

    const int exponent = exponent_above(size);
    const Floats unit = Isa::all(power(kUnit)), scale = Isa::all(power(kUnit - exponent)), limit = Isa::all(size);
    Count<Isa> weights, bounds;
    Floats check = Isa::all(0), largest = Isa::all(0);
    for (int32_t i = 0; i < n_groups; i++) {
        const int64_t first = int64_t{kCells} * visible[i];
        for (int j = 0; j < kCells; j += width) {
            float * at = row.scores + first + j;
            const Floats p = exponential<Isa>(Isa::minus(Isa::load(at), Isa::all(peak)));
            Isa::store(at, p);
            check = Isa::plus(check, p);
            weights.lanes = Isa::plus(weights.lanes, Isa::whole(Isa::multiply(p, unit)));
            // Hidden cells may have values that are not finite.
            const Floats size = Isa::multiply(Isa::smaller(Isa::load(row.largest + first + j), limit), scale);
            const Floats bound = Isa::multiply(p, size);
            largest = Isa::larger(bound, largest);
            bounds.lanes = Isa::plus(bounds.lanes, Isa::whole(bound));
        }
        if (i % 8 == 7) weights.flush(), bounds.flush();
    }
    weights.flush(), bounds.flush();
    float total = 0, product = 0;
    Isa::store(lanes[0], check), Isa::store(lanes[1], largest);
    for (int i = 0; i < width; i++) {
        total += lanes[0][i];
        if (lanes[1][i] > product) product = lanes[1][i];
    }
    if (!(total < kInfinity)) return __builtin_nanf("");

    // The largest power of two for which no sum reaches its limit, also if each product is rounded up.
    const double all = (double(bounds.total) + n_all) * (1 + 1e-6), few = kCells * double(product) * (1 + 1e-6);
    const auto fits = [&](int shift) {
        const double factor = power(shift);
        return (all * factor + n_all <= kLimit || few * factor + kCells <= kLimit) && all * factor + n_all <= kTotalLimit;
    };
    int shift = kLeastShift;
    for (int step = 64; step > 0; step /= 2) {
        if (shift + step <= kMostShift && fits(shift + step)) shift += step;
    }
    shift += kUnit - exponent;
    // The last bit of each weight is set. So no product ends in one half: with an odd number of 24 bits, a product is at least
    // 2^23 times its own last bit, and it is below 2^22.
    const Floats factor = Isa::all(power(shift));
    for (int32_t i = 0; i < n_groups; i++) {
        float * at = row.scores + int64_t{kCells} * visible[i];
        for (int j = 0; j < kCells; j += width) Isa::store(at + j, Isa::multiply(Isa::load(at + j), factor));
    }
    double sum = double(weights.total) / (1 << kUnit);
    if (row.sink) {
        float found[width];
        Isa::store(found, exponential<Isa>(Isa::all(*row.sink - peak)));
        sum += found[0];
    }
    return float(1 / (sum * power(shift)));
}

// N rows, and C registers of each cell's values at a time.
template <class Isa, int N, int C, class Source>
int weigh(int at, const float * const * weights, const Source & values, int d, int32_t * const * sums, const Next & next) {
    constexpr int width = Isa::kWidth;
    for (; at + C * width <= d; at += C * width) {
        prefetch(next, kCells * at / d, kCells * (at + C * width) / d);
        typename Isa::Floats sum[N][C];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sum[i][c] = Isa::all(kStart);
        }
        for (int j = 0; j < kCells; j++) {
            typename Isa::Floats value[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) value[c] = values.at(j, at + c * width);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                const auto weight = Isa::all(weights[i][j]);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) sum[i][c] = Isa::add(sum[i][c], weight, value[c]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
                int32_t * to = sums[i] + at + c * width;
                Isa::store(to, Isa::plus(Isa::load(to), Isa::whole(Isa::minus(sum[i][c], Isa::all(kStart)))));
            }
        }
    }
    return at;
}

template <class Isa, int N, class Source>
void weigh_all(const float * const * weights, const Source & values, int d, int32_t * const * sums, const Next & next) {
    constexpr int n = Isa::kSums / N, most = n >= 8 ? 8 : n >= 4 ? 4 : 2;
    const int at = weigh<Isa, N, most>(0, weights, values, d, sums, next);
    weigh<Isa, N, 1>(at, weights, values, d, sums, next);
}

template <class Isa, class Source, int... N>
void values(int n, const float * const * weights, const Source & from, int d, int32_t * const * sums, const Next & next,
            std::integer_sequence<int, N...>) {
    constexpr int most = Isa::kSums / 2;
    const int n_calls = (n + most - 1) / most;
    for (int call = 0; call < n_calls; call++) {
        const int first = n * call / n_calls, size = n * (call + 1) / n_calls - first;
        const Next once = call == 0 ? next : Next{};
        ((size == N + 1 ? weigh_all<Isa, N + 1>(weights + first, from, d, sums + first, once) : void()), ...);
    }
}

template <class Isa>
void values_of(int n, const float * const * weights, const float * from, int d, int32_t * const * sums, const Next & next) {
    values<Isa>(n, weights, Loaded<Isa>{from, size_t(d)}, d, sums, next, std::make_integer_sequence<int, Isa::kSums / 2>{});
}

template <class Isa>
void values_of_halves(int n, const float * const * weights, const uint8_t * from, size_t stride, int d, int32_t * const * sums,
                      const Next & next) {
    values<Isa>(n, weights, Halves<Isa>{from, stride}, d, sums, next, std::make_integer_sequence<int, Isa::kSums / 2>{});
}

template <class Isa>
constexpr Kernels kernels() {
    return {Isa::kName,   Isa::kWidth,    Isa::kSums / 2,       supports,
            load<Isa>,    largest<Isa>,   scores_of<Isa>,       scores_of_halves<Isa>,
            softmax<Isa>, values_of<Isa>, values_of_halves<Isa>};
}

}  // namespace
}  // namespace ggufspec::attention
