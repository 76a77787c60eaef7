// NEON: 4 floats in a register.
#include <arm_neon.h>

#include "kernel.h"

namespace ggufspec::attention {
namespace {

struct Neon {
    static constexpr const char * kName = "neon";
    static constexpr int kWidth = 4, kRows = 4, kSums = 16;  // what fits into 32 registers
    using Floats = float32x4_t;
    using Ints = int32x4_t;
    using Choice = uint32x4_t;

    static Floats load(const float * from) { return vld1q_f32(from); }
    static void store(float * to, Floats x) { vst1q_f32(to, x); }
    static Floats all(float x) { return vdupq_n_f32(x); }
    static Floats plus(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats minus(Floats a, Floats b) { return vsubq_f32(a, b); }
    static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
    static Floats add(Floats to, Floats a, Floats b) { return vfmaq_f32(to, a, b); }
    // NaN if one of them is.
    static Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
    static Floats smaller(Floats a, Floats b) { return vminq_f32(a, b); }

    static Choice is_less(Floats a, Floats b) { return vcltq_f32(a, b); }
    static Floats choose(Choice choice, Floats a, Floats b) { return vbslq_f32(choice, a, b); }

    static Floats rounded(Floats x) { return vrndnq_f32(x); }
    static Floats powers(Floats x) {  // of two, for whole numbers from -126 on
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
    }
    static Floats odd(Floats x) { return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(1))); }

    static Ints no_ints() { return vdupq_n_s32(0); }
    static Ints load(const int32_t * from) { return vld1q_s32(from); }
    static void store(int32_t * to, Ints x) { vst1q_s32(to, x); }
    static Ints whole(Floats x) { return vcvtnq_s32_f32(x); }
    static Ints plus(Ints a, Ints b) { return vaddq_s32(a, b); }
    static int64_t total(Ints x) { return vaddlvq_s32(x); }

    static Floats halves(const uint8_t * from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
    static float half(uint16_t bits) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0); }
    static Floats brains(const uint8_t * from) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from)), 16));
    }
    static Floats bytes(const uint8_t * from) {
        int32_t four;
        std::memcpy(&four, from, sizeof(four));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))));
    }
    // The largest of n floats of 16 bits without their signs; n is a multiple of 16.
    static uint16_t most(const uint8_t * from, int n) {
        uint16x8_t found = vdupq_n_u16(0);
        for (int i = 0; i < n; i += 8) {
            found = vmaxq_u16(found, vandq_u16(vreinterpretq_u16_u8(vld1q_u8(from + 2 * i)), vdupq_n_u16(0x7fff)));
        }
        return vmaxvq_u16(found);
    }

    // to[i] = the sum of the lanes of x[i], for four registers.
    static void reduce(float * to, const Floats * x) {
        vst1q_f32(to, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
    }
};

}  // namespace

extern const Kernels neon;
constexpr Kernels neon = kernels<Neon>();

}  // namespace ggufspec::attention
