// Chooses the kernels for this processor when the extension is loaded.
#include <cstdlib>
#include <string>

#include "kernels.h"

namespace ggufspec {

extern const Kernels baseline;
#ifdef GGUFSPEC_LEVELS
extern const Kernels v3, v4;
#endif

namespace {

const Kernels & chosen() {
#ifdef GGUFSPEC_LEVELS
    const char * variable = std::getenv("GGUFSPEC_INSTRUCTIONS");
    const std::string most = variable ? variable : v4.instructions;
    __builtin_cpu_init();
    const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                        __builtin_cpu_supports("bmi2");
    const bool has_v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (most == baseline.instructions || !has_v3) return baseline;
    return most == v3.instructions || !has_v4 ? v3 : v4;
#else
    return baseline;
#endif
}

}  // namespace

const Kernels & kernels = chosen();

}  // namespace ggufspec
