// NEON with the dot product instructions of Armv8.2: 4 rows of weights in a register of 4 int32.
#include <arm_neon.h>

#include "kernel.h"

namespace ggufspec::matmul {
namespace {

struct NeonDotprod {
    static constexpr const char * kName = "neon_dotprod";
    static constexpr int kWidth = 4, kMost = 8;
    static constexpr bool kSigned = true;  // both factors are signed
    using Ints = uint8x16_t;
    using Floats = float32x4_t;

    static Ints load(const uint8_t * from) { return vld1q_u8(from); }
    template <int Shift, int Mask>
    static Ints field(Ints x) {
        const Ints mask = vdupq_n_u8(Mask);
        if constexpr (Shift > 0) return vandq_u8(vshlq_n_u8(x, Shift), mask);
        else if constexpr (Shift < 0) return vandq_u8(vshrq_n_u8(x, -Shift), mask);
        else return vandq_u8(x, mask);
    }
    static Ints either(Ints a, Ints b) { return vorrq_u8(a, b); }
    static Ints table(const int8_t * values, int offset) {
        return vreinterpretq_u8_s8(vaddq_s8(vld1q_s8(values), vdupq_n_s8(int8_t(offset))));
    }
    static Ints look_up(Ints table, Ints codes) { return vqtbl1q_u8(table, codes); }

    static Floats zeros() { return vdupq_n_f32(0); }
    static Floats all(float x) { return vdupq_n_f32(x); }
    static Floats floats(Ints x) { return vcvtq_f32_s32(vreinterpretq_s32_u8(x)); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return vfmaq_f32(to, a, b); }
    static void store(float * to, Floats x) { vst1q_f32(to, x); }

    static Floats singles(const uint8_t * from) { return vreinterpretq_f32_u8(vld1q_u8(from)); }
    static Floats halves(const uint8_t * from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
    static Floats brains(const uint8_t * from) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from)), 16));
    }
    // 2^(x - 128); 0 for the two smallest x.
    static Floats powers(const uint8_t * from) {
        int32_t bits[4];
        for (int i = 0; i < 4; i++) bits[i] = (from[i] > 1 ? from[i] - 1 : 0) << 23;
        return vreinterpretq_f32_s32(vld1q_s32(bits));
    }
    // Signed bytes; with a mask, only the bits in it.
    template <int Mask>
    static Floats bytes(const uint8_t * from) {
        int32_t values[4];
        for (int i = 0; i < 4; i++) values[i] = Mask == 0 ? int8_t(from[i]) : Mask == 15 ? from[i] & 15 : from[i] >> 4;
        return vcvtq_f32_s32(vld1q_s32(values));
    }

    template <int N, int>
    static Ints dot(const Ints * codes, const int8_t * values, int32_t start) {
        int32x4_t even = vdupq_n_s32(start), odd = vdupq_n_s32(0);
#pragma GCC unroll 2
        for (int i = 0; i < N; i += 4) {
            const int8x16_t sixteen = vld1q_s8(values + 4 * i);
            even = vdotq_laneq_s32(even, vreinterpretq_s8_u8(codes[i]), sixteen, 0);
            odd = vdotq_laneq_s32(odd, vreinterpretq_s8_u8(codes[i + 1]), sixteen, 1);
            even = vdotq_laneq_s32(even, vreinterpretq_s8_u8(codes[i + 2]), sixteen, 2);
            odd = vdotq_laneq_s32(odd, vreinterpretq_s8_u8(codes[i + 3]), sixteen, 3);
        }
        return vreinterpretq_u8_s32(vaddq_s32(even, odd));
    }

    static float quantize(const float * from, int8_t * to, int32_t * sums) {
        float32x4_t most = zeros();
        for (int i = 0; i < kBlock; i += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(from + i)));
        const float largest = vmaxvq_f32(most), rate = largest > 0 ? 127 / largest : 0;
        for (int half = 0; half < 2; half++) {
            int32x4_t sum = vdupq_n_s32(0);
            for (int i = 16 * half; i < 16 * half + 16; i += 8) {
                const int32x4_t a = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + i), rate));
                const int32x4_t b = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + i + 4), rate));
                sum = vaddq_s32(sum, vaddq_s32(a, b));
                vst1_s8(to + i, vqmovn_s16(vcombine_s16(vqmovn_s32(a), vqmovn_s32(b))));
            }
            sums[half] = vaddvq_s32(sum);
        }
        return largest / 127;
    }
};

}  // namespace

extern const Instructions neon_dotprod;
constexpr Instructions neon_dotprod = instructions<NeonDotprod>();

}  // namespace ggufspec::matmul
