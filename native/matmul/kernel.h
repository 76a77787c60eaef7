// The kernels as templates over an instruction set. The file of each instruction set includes this, and is compiled with
// its flags. So all functions here and below are in an unnamed namespace, and none is of the standard library: of functions
// that several files share, the linker keeps one copy, which may have instructions that this processor lacks.
//
// Isa has: kName, kWidth (lanes of an int32 register, and number of interleaved rows of weights), kMost (rows of activations
// at a time), kSigned (codes of 8 bits are signed), Ints, Floats, and the operations used below.
#pragma once

#include <utility>

#include "kernels.h"
#include "types.h"

namespace ggufspec::matmul {
namespace {

constexpr int kAhead = 1536;  // distance of prefetches, in bytes

template <class Isa, class T>
struct Layout {
    static constexpr bool kHasSubBlocks = T::kValues > kBlock;
    static constexpr int kBlocks = T::kValues / kBlock;
    static constexpr int kHeader = (T::kScale == Scale::e8m0 ? 1 : T::kMinima ? 4 : 2) * Isa::kWidth;
    static constexpr int kBytes = 4 * Isa::kWidth;  // bytes of a register of codes
    static constexpr int kScales = kHasSubBlocks ? (T::kHalves ? 2 : 1) * (T::kMinima && !T::kJoint ? 2 : 1) * Isa::kWidth : 0;
    static constexpr int kCodes = (T::kLow + T::kHigh) * kBytes;
    static constexpr int kSuper = kHeader + kBlocks * (kScales + kCodes);
};

// Whether codes are packed as signed bytes, which then need no offset.
template <class Isa, class T>
constexpr bool is_signed() {
    return Isa::kSigned && T::kLargest == 255;
}

template <class Isa, class T>
void pack_row(uint8_t * to, const Decoded & from, int row) {
    using L = Layout<Isa, T>;
    constexpr int width = Isa::kWidth;
    if constexpr (T::kScale == Scale::e8m0) {
        to[row] = uint8_t(from.scale);
    } else {
        std::memcpy(to + 2 * row, &from.scale, 2);
        if constexpr (T::kMinima) std::memcpy(to + 2 * (width + row), &from.minimum, 2);
    }
    to += L::kHeader;
    constexpr int n_scales = T::kHalves ? 2 : 1;
    for (int block = 0; block < L::kBlocks; block++, to += L::kScales + L::kCodes) {
        if constexpr (L::kHasSubBlocks) {
            for (int i = 0; i < n_scales; i++) {
                to[width * i + row] = uint8_t(from.scales[n_scales * block + i]);
                if constexpr (T::kMinima && !T::kJoint) to[width * (n_scales + i) + row] = from.minima[n_scales * block + i];
            }
        }
        uint32_t four[8];  // four codes in each
        std::memcpy(four, from.codes + kBlock * block, kBlock);
        if constexpr (is_signed<Isa, T>() && T::kTable == Table::none) {
            for (uint32_t & each : four) each ^= 0x80808080;
        }
        uint32_t planes[T::kLow + T::kHigh] = {};
        constexpr uint32_t ones = 0x01010101;
        for (int i = 0; i < 8; i++) {
            if constexpr (T::kLow == 8) planes[i] = four[i];
            if constexpr (T::kLow == 4) planes[i % 4] |= (four[i] & (15 * ones)) << (i / 4 * 4);
            if constexpr (T::kLow == 2) planes[i / 4] |= (four[i] & (3 * ones)) << (i % 4 * 2);
            if constexpr (T::kHigh == 1) planes[T::kLow] |= ((four[i] >> T::kLow) & ones) << i;
            if constexpr (T::kHigh == 2) planes[T::kLow + i / 4] |= ((four[i] >> T::kLow) & (3 * ones)) << (i % 4 * 2);
        }
        for (int i = 0; i < T::kLow + T::kHigh; i++) { std::memcpy(to + L::kScales + i * L::kBytes + 4 * row, planes + i, 4); }
    }
}

template <class Isa, class T>
void pack(uint8_t * to, const uint8_t * from, int64_t n_super, int64_t n_rows, int64_t begin, int64_t end) {
    using L = Layout<Isa, T>;
    static const Decoded zeros{};
    for (int64_t group = begin; group < end; group++) {
        for (int64_t super = 0; super < n_super; super++) {
            uint8_t * packed = to + (group * n_super + super) * L::kSuper;
            for (int row = 0; row < Isa::kWidth; row++) {
                const int64_t at = group * Isa::kWidth + row;
                if (at >= n_rows) {
                    pack_row<Isa, T>(packed, zeros, row);
                    continue;
                }
                typename T::Block block;
                std::memcpy(&block, from + (at * n_super + super) * sizeof(block), sizeof(block));
                Decoded decoded;
                T::decode(block, decoded);
                pack_row<Isa, T>(packed, decoded, row);
            }
        }
    }
}

template <class Isa, class T>
void convert(void * to, const float * from, int64_t begin, int64_t end) {
    auto * rows = static_cast<Activations *>(to);
    for (int64_t i = begin; i < end; i++) {
        Activations & row = rows[i];
        int32_t sums[2];
        row.scale = Isa::quantize(from + kBlock * i, row.values, sums);
        if constexpr (!T::kHalves) sums[0] += sums[1];
        for (int half = 0; half < 2; half++) {
            if constexpr (T::kMinima) row.minus[half] = -row.scale * float(sums[half]);
            else row.start[half] = is_signed<Isa, T>() ? 0 : -T::kOffset * sums[half];
        }
    }
}

template <int I>
struct Constant {
    static constexpr int value = I;
    constexpr operator int() const { return I; }
};

template <class F, int... I>
inline void for_each(F && f, std::integer_sequence<int, I...>) {
    (f(Constant<I>{}), ...);
}

template <int N, class F>
inline void for_each(F && f) {
    for_each(f, std::make_integer_sequence<int, N>{});
}

template <class Isa, class T>
inline void unpack(const uint8_t * from, typename Isa::Ints (&codes)[8]) {
    constexpr int bytes = Layout<Isa, T>::kBytes;
    if constexpr (T::kLow == 8) {
        for (int i = 0; i < 8; i++) codes[i] = Isa::load(from + bytes * i);
    } else if constexpr (T::kLow == 4) {
        for (int i = 0; i < 4; i++) {
            const auto both = Isa::load(from + bytes * i);
            codes[i] = Isa::template field<0, 15>(both);
            codes[4 + i] = Isa::template field<-4, 15>(both);
        }
    } else {
        for (int i = 0; i < 2; i++) {
            const auto four = Isa::load(from + bytes * i);
            codes[4 * i] = Isa::template field<0, 3>(four);
            codes[4 * i + 1] = Isa::template field<-2, 3>(four);
            codes[4 * i + 2] = Isa::template field<-4, 3>(four);
            codes[4 * i + 3] = Isa::template field<-6, 3>(four);
        }
    }
    from += T::kLow * bytes;
    if constexpr (T::kHigh == 1) {
        const auto eight = Isa::load(from);
        for_each<8>([&](auto i) {
            codes[i] = Isa::either(codes[i], Isa::template field<T::kLow - decltype(i)::value, 1 << T::kLow>(eight));
        });
    } else if constexpr (T::kHigh == 2) {
        const typename Isa::Ints fours[2] = {Isa::load(from), Isa::load(from + bytes)};
        for_each<8>([&](auto i) {
            constexpr int shift = T::kLow - decltype(i)::value % 4 * 2;
            codes[i] = Isa::either(codes[i], Isa::template field<shift, 3 << T::kLow>(fours[i / 4]));
        });
    }
    if constexpr (T::kTable != Table::none) {
        const int8_t * table = T::kTable == Table::iq4 ? kTableIq4 : kTableMxfp4;
        const auto loaded = Isa::table(table, is_signed<Isa, T>() ? 0 : T::kOffset);
        for (int i = 0; i < 8; i++) codes[i] = Isa::look_up(loaded, codes[i]);
    }
}

template <class Isa>
inline void store(float * out, typename Isa::Floats sums, int64_t group, int64_t n_rows) {
    const int64_t first = group * Isa::kWidth;
    if (first + Isa::kWidth <= n_rows) {
        Isa::store(out + first, sums);
    } else {
        float last[Isa::kWidth];
        Isa::store(last, sums);
        std::memcpy(out + first, last, (n_rows - first) * sizeof(float));
    }
}

template <class Isa, class T, int N>
void multiply_rows(const uint8_t * weights, const void * const * rows, float * const * out, int64_t n_super, int64_t n_rows,
                   int64_t begin, int64_t end) {
    using L = Layout<Isa, T>;
    using Ints = typename Isa::Ints;
    using Floats = typename Isa::Floats;
    constexpr int width = Isa::kWidth, n_halves = T::kHalves ? 2 : 1;
    for (int64_t group = begin; group < end; group++) {
        Floats sums[N];
        for (int i = 0; i < N; i++) sums[i] = Isa::zeros();
        const uint8_t * from = weights + group * n_super * L::kSuper;
        for (int64_t super = 0; super < n_super; super++) {
            Floats scale, minimum;
            if constexpr (T::kScale == Scale::e8m0) scale = Isa::powers(from);
            else scale = Isa::halves(from);
            if constexpr (T::kMinima) minimum = Isa::halves(from + 2 * width);
            from += L::kHeader;
            for (int block = 0; block < L::kBlocks; block++) {
                for (int i = 0; i < L::kScales + L::kCodes; i += 64) __builtin_prefetch(from + kAhead + i);
                Floats scales[2] = {scale, scale}, minima[2] = {scale, scale};
                if constexpr (T::kMinima) minima[0] = minima[1] = minimum;
                if constexpr (L::kHasSubBlocks) {
                    for (int i = 0; i < n_halves; i++) {
                        const uint8_t * at = from + width * i;
                        if constexpr (T::kJoint) {
                            scales[i] = Isa::multiply(scale, Isa::template bytes<15>(at));
                            minima[i] = Isa::multiply(minimum, Isa::template bytes<240>(at));
                        } else {
                            scales[i] = Isa::multiply(scale, Isa::template bytes<0>(at));
                            if constexpr (T::kMinima) {
                                minima[i] = Isa::multiply(minimum, Isa::template bytes<0>(at + width * n_halves));
                            }
                        }
                    }
                }
                Ints codes[8];
                unpack<Isa, T>(from + L::kScales, codes);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) {
                    const Activations & row = static_cast<const Activations *>(rows[i])[super * L::kBlocks + block];
                    if constexpr (T::kHalves) {
                        const int32_t first_start = T::kMinima ? 0 : row.start[0], second_start = T::kMinima ? 0 : row.start[1];
                        const Ints first = Isa::template dot<4, T::kLargest>(codes, row.values, first_start);
                        const Ints second = Isa::template dot<4, T::kLargest>(codes + 4, row.values + 16, second_start);
                        const Floats both =
                            Isa::add(Isa::multiply(Isa::floats(first), scales[0]), Isa::floats(second), scales[1]);
                        sums[i] = Isa::add(sums[i], both, Isa::all(row.scale));
                    } else {
                        const Ints dot = Isa::template dot<8, T::kLargest>(codes, row.values, T::kMinima ? 0 : row.start[0]);
                        sums[i] = Isa::add(sums[i], Isa::floats(dot), Isa::multiply(scales[0], Isa::all(row.scale)));
                    }
                    if constexpr (T::kMinima) {
                        for (int j = 0; j < n_halves; j++) sums[i] = Isa::add(sums[i], minima[j], Isa::all(row.minus[j]));
                    }
                }
                from += L::kScales + L::kCodes;
            }
        }
        for (int i = 0; i < N; i++) store<Isa>(out[i], sums[i], group, n_rows);
    }
}

// Weights that are floats: the activations are not converted.

template <class Isa, class T>
void pack_floats(uint8_t * to, const uint8_t * from, int64_t n_super, int64_t n_rows, int64_t begin, int64_t end) {
    const int64_t n = n_super * kBlock;
    for (int64_t row = begin * Isa::kWidth; row < end * Isa::kWidth; row++) {
        uint8_t * packed = to + T::kBytes * (row / Isa::kWidth * n * Isa::kWidth + row % Isa::kWidth);
        for (int64_t i = 0; i < n; i++, packed += T::kBytes * Isa::kWidth) {
            if (row < n_rows) std::memcpy(packed, from + T::kBytes * (row * n + i), T::kBytes);
            else std::memset(packed, 0, T::kBytes);
        }
    }
}

inline void copy_floats(void * to, const float * from, int64_t begin, int64_t end) {
    std::memcpy(static_cast<float *>(to) + kBlock * begin, from + kBlock * begin, kBlock * (end - begin) * sizeof(float));
}

template <class Isa, class T>
typename Isa::Floats floats_of(const uint8_t * from) {
    if constexpr (T::kScale == Scale::f16_weights) return Isa::halves(from);
    else if constexpr (T::kScale == Scale::bf16_weights) return Isa::brains(from);
    else return Isa::singles(from);
}

template <class Isa, class T, int N>
void multiply_float_rows(const uint8_t * weights, const void * const * rows, float * const * out, int64_t n_super, int64_t n_rows,
                         int64_t begin, int64_t end) {
    constexpr int bytes = T::kBytes * Isa::kWidth;
    for (int64_t group = begin; group < end; group++) {
        typename Isa::Floats sums[N][2];  // sums of even and of odd columns: a single chain of additions is slower than memory
        for (int i = 0; i < N; i++) sums[i][0] = sums[i][1] = Isa::zeros();
        const uint8_t * from = weights + group * n_super * kBlock * bytes;
        for (int64_t column = 0; column < n_super * kBlock; column += 2, from += 2 * bytes) {
            __builtin_prefetch(from + kAhead);
            for (int j = 0; j < 2; j++) {
                const auto weight = floats_of<Isa, T>(from + bytes * j);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) {
                    sums[i][j] = Isa::add(sums[i][j], weight, Isa::all(static_cast<const float *>(rows[i])[column + j]));
                }
            }
        }
        for (int i = 0; i < N; i++) { store<Isa>(out[i], Isa::add(sums[i][0], sums[i][1], Isa::all(1.0f)), group, n_rows); }
    }
}

template <class T>
constexpr bool kHoldsFloats =
    T::kScale == Scale::f32_weights || T::kScale == Scale::f16_weights || T::kScale == Scale::bf16_weights;

template <class Isa, class T, int... N>
void multiply(int n, const uint8_t * weights, const void * const * rows, float * const * out, int64_t n_super, int64_t n_rows,
              int64_t begin, int64_t end) {
    static_assert(sizeof...(N) == Isa::kMost);
    const auto run = [&](auto function) { function(weights, rows, out, n_super, n_rows, begin, end); };
    if constexpr (kHoldsFloats<T>) ((n == N + 1 ? run(multiply_float_rows<Isa, T, N + 1>) : void()), ...);
    else ((n == N + 1 ? run(multiply_rows<Isa, T, N + 1>) : void()), ...);
}

template <class Isa, class T, int... N>
constexpr Kernel kernel(std::integer_sequence<int, N...>) {
    if constexpr (kHoldsFloats<T>) {
        return {T::kName,
                T::kType,
                kBlock,
                T::kBytes * kBlock,
                size_t(T::kBytes * kBlock * Isa::kWidth),
                sizeof(float) * kBlock,
                pack_floats<Isa, T>,
                copy_floats,
                multiply<Isa, T, N...>};
    } else {
        return {T::kName,
                T::kType,
                T::kValues,
                sizeof(typename T::Block),
                size_t(Layout<Isa, T>::kSuper),
                sizeof(Activations) * T::kValues / kBlock,
                pack<Isa, T>,
                convert<Isa, T>,
                multiply<Isa, T, N...>};
    }
}

template <class Isa, class... T>
struct Kernels {
    static constexpr Kernel all[] = {kernel<Isa, T>(std::make_integer_sequence<int, Isa::kMost>{})...};
};

template <class Isa>
constexpr Instructions instructions() {
    using All = Kernels<Isa, Q4_K, Q6_K, Q3_K, Q4_0, Q8_0, Q5_K, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q5_0, Q4_1, Q5_1, F16, BF16, F32>;
    return {Isa::kName, Isa::kWidth, Isa::kMost, All::all, sizeof(All::all) / sizeof(Kernel)};
}

}  // namespace
}  // namespace ggufspec::matmul
