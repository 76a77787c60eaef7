// Operations shared by AVX2 and AVX-VNNI: 8 rows of weights in a register of 8 int32.
#pragma once

#include <immintrin.h>

#include "kernel.h"

namespace ggufspec::matmul {
namespace {

struct Avx2Base {
    static constexpr int kWidth = 8;
    using Ints = __m256i;
    using Floats = __m256;

    static Ints load(const uint8_t * from) { return _mm256_loadu_si256(reinterpret_cast<const Ints *>(from)); }
    template <int Shift, int Mask>
    static Ints field(Ints x) {
        const Ints mask = _mm256_set1_epi8(Mask);
        if constexpr (Shift > 0) return _mm256_and_si256(_mm256_slli_epi16(x, Shift), mask);
        else if constexpr (Shift < 0) return _mm256_and_si256(_mm256_srli_epi16(x, -Shift), mask);
        else return _mm256_and_si256(x, mask);
    }
    static Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
    static Ints table(const int8_t * values, int offset) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i *>(values));
        return _mm256_broadcastsi128_si256(_mm_add_epi8(row, _mm_set1_epi8(char(offset))));
    }
    static Ints look_up(Ints table, Ints codes) { return _mm256_shuffle_epi8(table, codes); }

    static Floats zeros() { return _mm256_setzero_ps(); }
    static Floats all(float x) { return _mm256_set1_ps(x); }
    static Floats floats(Ints x) { return _mm256_cvtepi32_ps(x); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, to); }
    static void store(float * to, Floats x) { _mm256_storeu_ps(to, x); }

    static Floats singles(const uint8_t * from) { return _mm256_loadu_ps(reinterpret_cast<const float *>(from)); }
    static Floats halves(const uint8_t * from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }
    static Floats brains(const uint8_t * from) {
        const Ints x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    }
    // 2^(x - 128); 0 for the two smallest x.
    static Floats powers(const uint8_t * from) {
        const Ints x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
        const Ints exponent = _mm256_max_epi32(_mm256_sub_epi32(x, _mm256_set1_epi32(1)), _mm256_setzero_si256());
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    // Signed bytes; with a mask, only the bits in it.
    template <int Mask>
    static Floats bytes(const uint8_t * from) {
        const Ints x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
        if constexpr (Mask == 0) return floats(x);
        else return floats(_mm256_and_si256(Mask == 15 ? x : _mm256_srli_epi32(x, 4), _mm256_set1_epi32(15)));
    }

    static Ints four(const int8_t * values) {
        int32_t bits;
        std::memcpy(&bits, values, 4);
        return _mm256_set1_epi32(bits);
    }

    static float quantize(const float * from, int8_t * to, int32_t * sums) {
        Floats values[4];
        Floats most = zeros();
        for (int i = 0; i < 4; i++) {
            values[i] = _mm256_loadu_ps(from + 8 * i);
            most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), values[i]));
        }
        __m128 most4 = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
        most4 = _mm_max_ps(most4, _mm_movehl_ps(most4, most4));
        const float largest = _mm_cvtss_f32(_mm_max_ss(most4, _mm_shuffle_ps(most4, most4, 1)));
        const Floats rate = all(largest > 0 ? 127 / largest : 0);
        for (int half = 0; half < 2; half++) {
            const Ints a = _mm256_cvtps_epi32(_mm256_mul_ps(values[2 * half], rate));
            const Ints b = _mm256_cvtps_epi32(_mm256_mul_ps(values[2 * half + 1], rate));
            const Ints sum8 = _mm256_add_epi32(a, b);
            __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sum8), _mm256_extracti128_si256(sum8, 1));
            sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
            sums[half] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 1)));
            const Ints packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
            const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16 * half), _mm_packs_epi16(low, high));
        }
        return largest / 127;
    }
};

}  // namespace
}  // namespace ggufspec::matmul
