// The kernels by instruction set. This file is compiled without any.
#include <cstring>

#include "kernels.h"

namespace ggufspec::attention {

#ifdef GGUFSPEC_X86
extern const Kernels avx512, avx2;
#elif defined(GGUFSPEC_NEON)
extern const Kernels neon;
#endif

const Kernels * find_kernels(const char * instructions) {
#ifdef GGUFSPEC_X86
    return std::strcmp(instructions, "avx512_vnni") == 0 ? &avx512 : &avx2;
#elif defined(GGUFSPEC_NEON)
    (void) instructions;
    return &neon;
#else
    (void) instructions;
    return nullptr;
#endif
}

}  // namespace ggufspec::attention
