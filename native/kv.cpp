#include "kv.h"

namespace ggufspec {

bool truncate(uintptr_t llama_memory_seq_rm, uintptr_t memory, int32_t sequence, int32_t first) {
    using Function = bool (*)(void *, int32_t, int32_t, int32_t);
    return reinterpret_cast<Function>(llama_memory_seq_rm)(reinterpret_cast<void *>(memory), sequence, first, -1);
}

const float * logits(uintptr_t llama_get_logits_ith, uintptr_t context, int32_t i) {
    using Function = float * (*)(void *, int32_t);
    return reinterpret_cast<Function>(llama_get_logits_ith)(reinterpret_cast<void *>(context), i);
}

}  // namespace ggufspec
