// The samplers that depend on the tokens before: penalties and DRY.
#pragma once

#include <cstddef>

#include "chain.h"

namespace ggufspec {

// Applies penalties or dry to candidates.
void penalize(Sampler sampler, const Sampling & sampling, const Text & text, Candidates & candidates);

// Applies penalties or dry to a row of logits (n_vocab).
void apply_to_row(Sampler sampler, const Sampling & sampling, const Text & text, float * logits, size_t n_vocab);

}  // namespace ggufspec
