// Logits -> probabilities, and the draw of a token. Knows rows of floats; no Python, no RNG, no llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ggufspec {

// What turns logits into a distribution. Order and meaning are llama.cpp's defaults:
// bias, top-k, top-p, min-p, then temperature. A temperature of 0 (or below) is one-hot at the largest logit.
struct Sampling {
    double temperature;
    int64_t top_k;  // <= 0: off
    double top_p;   // >= 1: off
    double min_p;   // <= 0: off
    std::vector<std::pair<int32_t, float>> logit_bias;  // added to the logits; -infinity bans a token
};

// Writes the distribution of one row. Returns false where no token can be drawn: every logit is -infinity or NaN.
bool to_probs(const float * logits, size_t n_vocab, const Sampling & sampling, float * probs);

// The token at which the cumulative probability first exceeds coin * total; coin in [0, 1).
int32_t pick(const float * probs, size_t n_vocab, double coin);

}  // namespace ggufspec
