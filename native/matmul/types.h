// The types of weights: how ggml stores them (ggml-common.h, ggml-quants.c), and how they are packed.
#pragma once

#include <cstdint>
#include <cstring>

namespace ggufspec::matmul {
namespace {  // see kernel.h

// The value of a weight is scale * (code - offset), or scale * code - minimum.
enum class Scale { f16, e8m0, bf16_weights, f16_weights, f32_weights };
enum class Table { none, iq4, mxfp4 };

// The decoded content of a block, in the order of its values.
struct Decoded {
    uint16_t scale = 0, minimum = 0;  // as bits of float16; e8m0 in the low byte
    int8_t scales[16];                // scales of sub-blocks, to be multiplied by `scale`
    uint8_t minima[16];
    uint8_t codes[256];
};

// kLow and kHigh: numbers of low and high bits of a code, which are stored in two planes. kHalves: sub-blocks have 16 values
// instead of 32, each with a scale.
template <int Low, int High, int Offset, int Values = 32, bool Minima = false, bool Halves = false>
struct Format {
    static constexpr int kLow = Low, kHigh = High, kOffset = Offset, kValues = Values;
    static constexpr bool kMinima = Minima, kHalves = Halves;
    static constexpr int kLargest = (1 << (Low + High)) - 1;  // largest code, after the table look-up
    static constexpr Table kTable = Table::none;
    static constexpr Scale kScale = Scale::f16;
    static constexpr bool kJoint = false;  // a sub-block's scale and minimum share a byte
};

inline void nibbles(const uint8_t * packed, int n, uint8_t * codes) {
    for (int i = 0; i < n; i++) {
        codes[i] = packed[i] & 15;
        codes[n + i] = packed[i] >> 4;
    }
}

struct Q4_0 : Format<4, 0, 8> {
    static constexpr const char * kName = "q4_0";
    static constexpr int kType = 2;
    struct Block {
        uint16_t d;
        uint8_t qs[16];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        nibbles(block.qs, 16, to.codes);
    }
};

struct Q4_1 : Format<4, 0, 0, 32, true> {
    static constexpr const char * kName = "q4_1";
    static constexpr int kType = 3;
    struct Block {
        uint16_t d, m;
        uint8_t qs[16];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        to.minimum = block.m ^ 0x8000;
        nibbles(block.qs, 16, to.codes);
    }
};

inline void fifth_bits(const uint8_t * packed, uint8_t * codes) {
    for (int i = 0; i < 32; i++) codes[i] |= ((packed[i / 8] >> (i % 8)) & 1) << 4;
}

struct Q5_0 : Format<4, 1, 16> {
    static constexpr const char * kName = "q5_0";
    static constexpr int kType = 6;
    struct Block {
        uint16_t d;
        uint8_t qh[4], qs[16];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        nibbles(block.qs, 16, to.codes);
        fifth_bits(block.qh, to.codes);
    }
};

struct Q5_1 : Format<4, 1, 0, 32, true> {
    static constexpr const char * kName = "q5_1";
    static constexpr int kType = 7;
    struct Block {
        uint16_t d, m;
        uint8_t qh[4], qs[16];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        to.minimum = block.m ^ 0x8000;
        nibbles(block.qs, 16, to.codes);
        fifth_bits(block.qh, to.codes);
    }
};

struct Q8_0 : Format<8, 0, 128> {
    static constexpr const char * kName = "q8_0";
    static constexpr int kType = 8;
    struct Block {
        uint16_t d;
        uint8_t qs[32];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        for (int i = 0; i < 32; i++) to.codes[i] = block.qs[i] ^ 0x80;
    }
};

// Scales and minima of 6 bits, in 12 bytes.
inline void six_bits(const uint8_t * packed, Decoded & to) {
    for (int i = 0; i < 4; i++) {
        to.scales[i] = packed[i] & 63;
        to.minima[i] = packed[i + 4] & 63;
        to.scales[i + 4] = (packed[i + 8] & 15) | ((packed[i] >> 6) << 4);
        to.minima[i + 4] = (packed[i + 8] >> 4) | ((packed[i + 4] >> 6) << 4);
    }
}

struct Q4_K : Format<4, 0, 0, 256, true> {
    static constexpr const char * kName = "q4_K";
    static constexpr int kType = 12;
    struct Block {
        uint16_t d, dmin;
        uint8_t scales[12], qs[128];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        to.minimum = block.dmin;
        six_bits(block.scales, to);
        for (int i = 0; i < 4; i++) nibbles(block.qs + 32 * i, 32, to.codes + 64 * i);
    }
};

struct Q5_K : Format<4, 1, 0, 256, true> {
    static constexpr const char * kName = "q5_K";
    static constexpr int kType = 13;
    struct Block {
        uint16_t d, dmin;
        uint8_t scales[12], qh[32], qs[128];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        to.minimum = block.dmin;
        six_bits(block.scales, to);
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 32; j++) {
                const int low = i % 2 ? block.qs[i / 2 * 32 + j] >> 4 : block.qs[i / 2 * 32 + j] & 15;
                to.codes[32 * i + j] = uint8_t(low | ((block.qh[j] >> i) & 1) << 4);
            }
        }
    }
};

struct Q6_K : Format<4, 2, 32, 256, false, true> {
    static constexpr const char * kName = "q6_K";
    static constexpr int kType = 14;
    struct Block {
        uint8_t ql[128], qh[64];
        int8_t scales[16];
        uint16_t d;
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        std::memcpy(to.scales, block.scales, 16);
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 32; j++) {
                    const uint8_t low = block.ql[64 * half + 32 * (i % 2) + j], high = block.qh[32 * half + j];
                    to.codes[128 * half + 32 * i + j] = uint8_t((i < 2 ? low & 15 : low >> 4) | ((high >> (2 * i)) & 3) << 4);
                }
            }
        }
    }
};

inline void two_bits(const uint8_t * packed, uint8_t * codes) {
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 32; j++) codes[128 * half + 32 * i + j] = (packed[32 * half + j] >> (2 * i)) & 3;
        }
    }
}

struct Q3_K : Format<2, 1, 4, 256, false, true> {
    static constexpr const char * kName = "q3_K";
    static constexpr int kType = 11;
    struct Block {
        uint8_t hmask[32], qs[64], scales[12];
        uint16_t d;
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        for (int i = 0; i < 16; i++) {
            const int low = i < 8 ? block.scales[i] & 15 : block.scales[i - 8] >> 4;
            to.scales[i] = int8_t((low | ((block.scales[8 + i % 4] >> (2 * (i / 4))) & 3) << 4) - 32);
        }
        two_bits(block.qs, to.codes);
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < 32; j++) to.codes[32 * i + j] |= uint8_t(((block.hmask[j] >> i) & 1) << 2);
        }
    }
};

struct Q2_K : Format<2, 0, 0, 256, true, true> {
    static constexpr const char * kName = "q2_K";
    static constexpr int kType = 10;
    static constexpr bool kJoint = true;
    struct Block {
        uint8_t scales[16], qs[64];
        uint16_t d, dmin;
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        to.minimum = block.dmin;
        std::memcpy(to.scales, block.scales, 16);
        two_bits(block.qs, to.codes);
    }
};

struct IQ4_NL : Format<4, 0, 128> {
    static constexpr const char * kName = "iq4_nl";
    static constexpr int kType = 20;
    static constexpr int kLargest = 255;
    static constexpr Table kTable = Table::iq4;
    using Block = Q4_0::Block;
    static void decode(const Block & block, Decoded & to) { Q4_0::decode(block, to); }
};

struct IQ4_XS : Format<4, 0, 128, 256> {
    static constexpr const char * kName = "iq4_xs";
    static constexpr int kType = 23;
    static constexpr int kLargest = 255;
    static constexpr Table kTable = Table::iq4;
    struct Block {
        uint16_t d, scales_h;
        uint8_t scales_l[4], qs[128];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.d;
        for (int i = 0; i < 8; i++) {
            const int low = (block.scales_l[i / 2] >> (4 * (i % 2))) & 15;
            to.scales[i] = int8_t((low | ((block.scales_h >> (2 * i)) & 3) << 4) - 32);
            nibbles(block.qs + 16 * i, 16, to.codes + 32 * i);
        }
    }
};

struct MXFP4 : Format<4, 0, 12> {
    static constexpr const char * kName = "mxfp4";
    static constexpr int kType = 39;
    static constexpr int kLargest = 24;
    static constexpr Table kTable = Table::mxfp4;
    static constexpr Scale kScale = Scale::e8m0;
    struct Block {
        uint8_t e, qs[16];
    };
    static void decode(const Block & block, Decoded & to) {
        to.scale = block.e;
        nibbles(block.qs, 16, to.codes);
    }
};

struct F32 {
    static constexpr const char * kName = "f32";
    static constexpr int kType = 0, kBytes = 4;
    static constexpr Scale kScale = Scale::f32_weights;
};

struct F16 {
    static constexpr const char * kName = "f16";
    static constexpr int kType = 1, kBytes = 2;
    static constexpr Scale kScale = Scale::f16_weights;
};

struct BF16 {
    static constexpr const char * kName = "bf16";
    static constexpr int kType = 30, kBytes = 2;
    static constexpr Scale kScale = Scale::bf16_weights;
};

// The tables of codes; a kernel adds the offset and keeps them in registers of 16 bytes.
constexpr int8_t kTableIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTableMxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace
}  // namespace ggufspec::matmul
