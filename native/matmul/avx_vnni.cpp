// AVX-VNNI: sums of four products in 32 bits, in the registers of AVX2 (Intel since Alder Lake, AMD since Zen 5).
#include "avx2.h"

namespace ggufspec::matmul {
namespace {

struct AvxVnni : Avx2Base {
    static constexpr const char * kName = "avx_vnni";
    static constexpr int kMost = 6;
    static constexpr bool kSigned = false;

    template <int N, int>
    static Ints dot(const Ints * codes, const int8_t * values, int32_t start) {
        Ints even = _mm256_set1_epi32(start), odd = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = 0; i < N; i += 2) {
            even = _mm256_dpbusd_avx_epi32(even, codes[i], four(values + 4 * i));
            odd = _mm256_dpbusd_avx_epi32(odd, codes[i + 1], four(values + 4 * i + 4));
        }
        return _mm256_add_epi32(even, odd);
    }
};

}  // namespace

extern const Instructions avx_vnni;
constexpr Instructions avx_vnni = instructions<AvxVnni>();

}  // namespace ggufspec::matmul
