// Attention as an operation of ggml's CPU backend, which asks each of its extra buffer types about every operation.
#pragma once

#include "../ggml_abi.h"
#include "kernels.h"

namespace ggufspec::attention {

// Sets the kernels, once per process, before a model is loaded.
void set_kernels(const ggml::Functions & functions, const Kernels * kernels);

// Whether passes that this thread begins from now on use the kernels; at first, they do not. Returns what it was before.
bool use(bool whether);

// Whether the kernels compute all attention of the passes that this thread has begun since `use`; false if there was none.
bool computed_all();

// What computes an operation; null if it is no attention that there is code for.
ggml::TensorTraits * traits_of(const ggml::Tensor * op);

}  // namespace ggufspec::attention
