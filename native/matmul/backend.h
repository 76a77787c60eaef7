// The kernels as a buffer type of ggml's CPU backend, which llama.cpp offers the weights of a model.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml_abi.h"
#include "kernels.h"

namespace ggufspec::matmul {

// Puts the buffer type before all others, once for the process; later calls change nothing. Before the CPU device has made its
// list of buffer types, which it does for the first model.
void register_buffer_type(const ggml::Functions & functions, const Instructions & instructions);

// The types of weights (enum ggml_type) that models take the kernels for which this thread loads from now on. None: as without
// this. Models that other threads load, or other code in this one, keep llama.cpp's kernels. both: the weights of the file are
// kept beside the packed ones, so that devices read them for prompts, as those in a host buffer.
void offer(std::vector<int> types, bool both = false);

}  // namespace ggufspec::matmul
