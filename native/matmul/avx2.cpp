// AVX2: products of unsigned codes with signed values, summed in 16 bits as long as these cannot overflow.
#include "avx2.h"

namespace ggufspec::matmul {
namespace {

struct Avx2 : Avx2Base {
    static constexpr const char * kName = "avx2";
    static constexpr int kMost = 6;  // more rows do not fit into 16 registers
    static constexpr bool kSigned = true;

    template <int N, int Largest>
    static Ints dot(const Ints * codes, const int8_t * values, int32_t start) {
        const Ints ones = _mm256_set1_epi16(1);
        Ints total = _mm256_set1_epi32(start);
        if constexpr (Largest == 255) {  // signed codes from -128 on: move their signs to the values
#pragma GCC unroll 8
            for (int i = 0; i < N; i++) {
                const Ints products =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(codes[i]), _mm256_sign_epi8(four(values + 4 * i), codes[i]));
                total = _mm256_add_epi32(total, _mm256_madd_epi16(products, ones));
            }
        } else {
            constexpr int most = 32767 / (2 * 127 * Largest), sums = most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
            constexpr int n = sums < N ? sums : N;
#pragma GCC unroll 8
            for (int i = 0; i < N; i += n) {
                Ints products = _mm256_maddubs_epi16(codes[i], four(values + 4 * i));
#pragma GCC unroll 8
                for (int j = 1; j < n; j++) {
                    products = _mm256_add_epi16(products, _mm256_maddubs_epi16(codes[i + j], four(values + 4 * (i + j))));
                }
                total = _mm256_add_epi32(total, _mm256_madd_epi16(products, ones));
            }
        }
        return total;
    }
};

}  // namespace

extern const Instructions avx2;
constexpr Instructions avx2 = instructions<Avx2>();

}  // namespace ggufspec::matmul
