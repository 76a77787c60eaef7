// The kernels as a buffer type of ggml's CPU backend, which llama.cpp offers the weights of a model.
#pragma once

#include <cstdint>
#include <vector>

#include "../ggml_abi.h"
#include "kernels.h"

namespace ggufspec::matmul {

// Puts the buffer type before all others, once per process; later calls change nothing. Call it before the first model is
// loaded, when the CPU device makes its list of buffer types.
void register_buffer_type(const ggml::Functions & functions, const Instructions & instructions);

// Sets the types of weights (enum ggml_type) for which models use these kernels, if this thread loads them from now on. An
// empty list turns the kernels off. Models that other threads load keep llama.cpp's kernels. both: the file's weights are kept
// in addition to the packed ones, so that devices can read them for prompts, like weights in a host buffer.
void offer(std::vector<int> types, bool both = false);

}  // namespace ggufspec::matmul
