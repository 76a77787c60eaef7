// The instruction sets for which the extension was compiled.
#include <cstring>

#include "kernels.h"

namespace ggufspec::matmul {

#ifdef GGUFSPEC_X86
extern const Instructions avx512_vnni, avx_vnni, avx2;
const Instructions * const kInstructions[] = {&avx512_vnni, &avx_vnni, &avx2};
const size_t kNumInstructions = 3;
#elif defined(GGUFSPEC_NEON)
extern const Instructions neon_dotprod;
const Instructions * const kInstructions[] = {&neon_dotprod};
const size_t kNumInstructions = 1;
#else
const Instructions * const kInstructions[] = {nullptr};
const size_t kNumInstructions = 0;
#endif

const Instructions * find_instructions(const char * name) {
    for (size_t i = 0; i < kNumInstructions; i++) {
        const Instructions * each = kInstructions[i];
        if (std::strcmp(name, each->name) == 0 && each->supported()) return each;
    }
    return nullptr;
}

const Kernel * find_kernel(const Instructions & instructions, int type) {
    for (size_t i = 0; i < instructions.n_kernels; i++) {
        if (instructions.kernels[i].type == type) return instructions.kernels + i;
    }
    return nullptr;
}

}  // namespace ggufspec::matmul
