// AVX-512: 16 floats in a register.
#include <immintrin.h>

#include "kernel.h"

namespace ggufspec::attention {
namespace {

struct Avx512 {
    static constexpr const char * kName = "avx512";
    static constexpr int kWidth = 16, kRows = 6, kSums = 24;  // what fits into 32 registers
    using Floats = __m512;
    using Ints = __m512i;
    using Choice = __mmask16;

    static Floats load(const float * from) { return _mm512_loadu_ps(from); }
    static void store(float * to, Floats x) { _mm512_storeu_ps(to, x); }
    static Floats all(float x) { return _mm512_set1_ps(x); }
    static Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, to); }
    // b if one of them is NaN.
    static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }

    static Choice is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static Floats choose(Choice choice, Floats a, Floats b) { return _mm512_mask_blend_ps(choice, b, a); }

    static Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats powers(Floats x) {  // of two, for whole numbers from -126 on
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127)), 23));
    }
    static Floats odd(Floats x) { return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1))); }

    static Ints no_ints() { return _mm512_setzero_si512(); }
    static Ints load(const int32_t * from) { return _mm512_loadu_si512(from); }
    static void store(int32_t * to, Ints x) { _mm512_storeu_si512(to, x); }
    static Ints whole(Floats x) { return _mm512_cvtps_epi32(x); }
    static Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static int64_t total(Ints x) {
        int32_t lanes[16];
        _mm512_storeu_si512(lanes, x);
        int64_t sum = 0;
        for (const int32_t lane : lanes) sum += lane;
        return sum;
    }

    static Floats halves(const uint8_t * from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
    }
    static float half(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }
    static Floats brains(const uint8_t * from) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    }
    static Floats bytes(const uint8_t * from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
    }
    // The largest of n floats of 16 bits without their signs; n is a multiple of 16.
    static uint16_t most(const uint8_t * from, int n) {
        __m256i found = _mm256_setzero_si256();
        for (int i = 0; i < n; i += 16) {
            const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + 2 * i));
            found = _mm256_max_epu16(found, _mm256_and_si256(x, _mm256_set1_epi16(0x7fff)));
        }
        const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
        return uint16_t(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0));
    }

    // to[i] = the sum of the lanes of x[i], for four registers.
    static void reduce(float * to, const Floats * x) {
        const Floats a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
        const Floats b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
        const Floats sums = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums), 1));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), high);
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
};

}  // namespace

extern const Kernels avx512;
constexpr Kernels avx512 = kernels<Avx512>();

}  // namespace ggufspec::attention
