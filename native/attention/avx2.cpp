// AVX2: 8 floats in a register.
#include <immintrin.h>

#include "kernel.h"

namespace ggufspec::attention {
namespace {

struct Avx2 {
    static constexpr const char * kName = "avx2";
    static constexpr int kWidth = 8, kRows = 3, kSums = 12;  // what fits into 16 registers
    using Floats = __m256;
    using Ints = __m256i;
    using Choice = __m256;

    static Floats load(const float * from) { return _mm256_loadu_ps(from); }
    static void store(float * to, Floats x) { _mm256_storeu_ps(to, x); }
    static Floats all(float x) { return _mm256_set1_ps(x); }
    static Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, to); }
    // b if one of them is NaN.
    static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
    static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }

    static Choice is_less(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static Floats choose(Choice choice, Floats a, Floats b) { return _mm256_blendv_ps(b, a, choice); }

    static Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Floats powers(Floats x) {  // of two, for whole numbers from -126 on
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
    }
    static Floats odd(Floats x) { return _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(1))); }

    static Ints no_ints() { return _mm256_setzero_si256(); }
    static Ints load(const int32_t * from) { return _mm256_loadu_si256(reinterpret_cast<const Ints *>(from)); }
    static void store(int32_t * to, Ints x) { _mm256_storeu_si256(reinterpret_cast<Ints *>(to), x); }
    static Ints whole(Floats x) { return _mm256_cvtps_epi32(x); }
    static Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static int64_t total(Ints x) {
        int32_t lanes[8];
        _mm256_storeu_si256(reinterpret_cast<Ints *>(lanes), x);
        int64_t sum = 0;
        for (const int32_t lane : lanes) sum += lane;
        return sum;
    }

    static Floats halves(const uint8_t * from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    }
    static float half(uint16_t bits) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits))); }
    static Floats brains(const uint8_t * from) {
        const Ints x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    }
    static Floats bytes(const uint8_t * from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
    }
    // The largest of n floats of 16 bits without their signs; n is a multiple of 16.
    static uint16_t most(const uint8_t * from, int n) {
        Ints found = _mm256_setzero_si256();
        for (int i = 0; i < n; i += 16) {
            const Ints x = _mm256_loadu_si256(reinterpret_cast<const Ints *>(from + 2 * i));
            found = _mm256_max_epu16(found, _mm256_and_si256(x, _mm256_set1_epi16(0x7fff)));
        }
        const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
        return uint16_t(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0));
    }

    // to[i] = the sum of the lanes of x[i], for four registers.
    static void reduce(float * to, const Floats * x) {
        const Floats a = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
        const Floats b = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
        const Floats sums = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
    }
};

}  // namespace

extern const Kernels avx2;
constexpr Kernels avx2 = kernels<Avx2>();

}  // namespace ggufspec::attention
