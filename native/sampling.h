// Logits -> probabilities, and the draw of a token. Knows rows of floats; no Python, no RNG, no llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ggufspec {

// What turns logits into a distribution. Order and meaning are llama.cpp's defaults:
// bias, top-k, top-p, min-p, then temperature. A temperature of 0 (or below) is one-hot at the largest logit.
struct Sampling {
    double temperature;
    int64_t top_k;  // <= 0: off
    double top_p;   // >= 1: off
    double min_p;   // <= 0: off
    const int32_t * bias_tokens;
    const float * bias_values;  // added to the logit; -infinity bans the token
    size_t n_bias;
};

// Writes the distribution of one row. Returns false where no token can be drawn: every logit is -infinity or NaN.
bool to_probs(const float * logits, size_t n_vocab, const Sampling & sampling, float * probs);

// The token at which the cumulative probability first exceeds coin * total; coin in [0, 1).
int32_t pick(const float * probs, size_t n_vocab, double coin);

}  // namespace ggufspec
