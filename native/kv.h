// Two calls into the libllama that llama-cpp-python has already loaded, through borrowed addresses.
// Links no llama.cpp, so one build fits the CPU, CUDA, Metal and Vulkan builds of it.
#pragma once

#include <cstdint>

namespace ggufspec {

// Forgets the cells of a sequence from position `first` on. False: this kind of memory cannot drop a tail.
bool truncate(uintptr_t llama_memory_seq_rm, uintptr_t memory, int32_t sequence, int32_t first);

// The logits of the i-th token of the last batch, where llama.cpp keeps them; null if it keeps none.
const float * logits(uintptr_t llama_get_logits_ith, uintptr_t context, int32_t i);

}  // namespace ggufspec
