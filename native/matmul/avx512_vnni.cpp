// AVX-512 with VNNI: 16 rows of weights in a register of 16 int32.
#include <immintrin.h>

#include "kernel.h"

namespace ggufspec::matmul {
namespace {

struct Avx512Vnni {
    static constexpr const char * kName = "avx512_vnni";
    static constexpr int kWidth = 16, kMost = 8;
    static constexpr bool kSigned = false;
    using Ints = __m512i;
    using Floats = __m512;

    static Ints load(const uint8_t * from) { return _mm512_loadu_si512(from); }
    template <int Shift, int Mask>
    static Ints field(Ints x) {
        const Ints mask = _mm512_set1_epi8(Mask);
        if constexpr (Shift > 0) return _mm512_and_si512(_mm512_slli_epi16(x, Shift), mask);
        else if constexpr (Shift < 0) return _mm512_and_si512(_mm512_srli_epi16(x, -Shift), mask);
        else return _mm512_and_si512(x, mask);
    }
    static Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
    static Ints table(const int8_t * values, int offset) {
        const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i *>(values));
        return _mm512_broadcast_i32x4(_mm_add_epi8(row, _mm_set1_epi8(char(offset))));
    }
    static Ints look_up(Ints table, Ints codes) { return _mm512_shuffle_epi8(table, codes); }

    static Floats zeros() { return _mm512_setzero_ps(); }
    static Floats all(float x) { return _mm512_set1_ps(x); }
    static Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, to); }
    static void store(float * to, Floats x) { _mm512_storeu_ps(to, x); }

    static Floats singles(const uint8_t * from) { return _mm512_loadu_ps(reinterpret_cast<const float *>(from)); }
    static Floats halves(const uint8_t * from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    }
    static Floats brains(const uint8_t * from) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    // 2^(x - 128); 0 for the two smallest x.
    static Floats powers(const uint8_t * from) {
        const Ints x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_max_epi32(_mm512_sub_epi32(x, _mm512_set1_epi32(1)), _mm512_setzero_si512()), 23));
    }
    // Signed bytes; with a mask, only the bits in it.
    template <int Mask>
    static Floats bytes(const uint8_t * from) {
        const Ints x = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
        if constexpr (Mask == 0) return floats(x);
        else return floats(_mm512_and_si512(Mask == 15 ? x : _mm512_srli_epi32(x, 4), _mm512_set1_epi32(15)));
    }

    template <int N, int Largest>
    static Ints dot(const Ints * codes, const int8_t * values, int32_t start) {
        const auto four = [&](int i) {
            int32_t bits;
            std::memcpy(&bits, values + 4 * i, 4);
            return _mm512_set1_epi32(bits);
        };
        Ints even = _mm512_set1_epi32(start), odd = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < N; i += 2) {
            even = _mm512_dpbusd_epi32(even, codes[i], four(i));
            odd = _mm512_dpbusd_epi32(odd, codes[i + 1], four(i + 1));
        }
        return _mm512_add_epi32(even, odd);
    }

    static float quantize(const float * from, int8_t * to, int32_t * sums) {
        const Floats first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + 16);
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
        const Floats rate = all(largest > 0 ? 127 / largest : 0);
        const Ints a = _mm512_cvtps_epi32(_mm512_mul_ps(first, rate)), b = _mm512_cvtps_epi32(_mm512_mul_ps(second, rate));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16), _mm512_cvtepi32_epi8(b));
        sums[0] = _mm512_reduce_add_epi32(a);
        sums[1] = _mm512_reduce_add_epi32(b);
        return largest / 127;
    }
};

}  // namespace

extern const Instructions avx512_vnni;
constexpr Instructions avx512_vnni = instructions<Avx512Vnni>();

}  // namespace ggufspec::matmul
