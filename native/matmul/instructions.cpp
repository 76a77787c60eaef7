// The instruction sets for which the extension was compiled. What asks the processor is compiled without any of them.
#include <cstring>

#if defined(GGUFSPEC_NEON) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace ggufspec::matmul {

#ifdef GGUFSPEC_X86
extern const Instructions avx512_vnni, avx_vnni, avx2;
#elif defined(GGUFSPEC_NEON)
extern const Instructions neon_dotprod;
#endif

std::vector<const Instructions *> supported_instructions() {
    std::vector<const Instructions *> found;
#ifdef GGUFSPEC_X86
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (has_avx2 && has_avx512) found.push_back(&avx512_vnni);
    if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&avx_vnni);
    if (has_avx2) found.push_back(&avx2);
#elif defined(GGUFSPEC_NEON)
    bool has_dotprod = true;  // all of Apple's processors have them
#ifdef __linux__
    has_dotprod = getauxval(AT_HWCAP) & (1 << 20);  // HWCAP_ASIMDDP
#endif
    if (has_dotprod) found.push_back(&neon_dotprod);
#endif
    return found;
}

const Instructions * find_instructions(const char * name) {
    for (const Instructions * each : supported_instructions()) {
        if (std::strcmp(name, each->name) == 0) return each;
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
