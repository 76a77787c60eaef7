// llama.cpp's samplers over a list of candidates, with its float arithmetic and its order of equal logits, so that the
// same candidates remain. Exact but slow; sampling.cpp has shortcuts that give the same distribution.
// Source of the semantics: src/llama-sampler.cpp of llama.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ggufspec {

enum class Sampler { penalties, dry, top_n_sigma, top_k, typical_p, top_p, min_p, temperature };

// The sequence breakers of DRY: tokens that begin one, and the tokens that have to follow.
struct Breakers {
    std::vector<std::vector<int32_t>> tails;
    std::vector<std::pair<int32_t, uint32_t>> heads;  // (first token, index of its tail), sorted
};

// The options that turn logits into a distribution.
struct Sampling {
    std::vector<Sampler> order;
    float temperature = 1;      // 0: one-hot at the largest logit
    int64_t top_k = 0;          // 0: off
    float top_p = 1;            // 1: off
    float min_p = 0;            // 0: off
    float typical_p = 1;        // 1: off
    float top_n_sigma = 0;      // 0: off
    int64_t penalty_last_n = 0;  // last tokens that are penalized; 0: off, -1: all
    float repeat_penalty = 1;    // 1: off
    float frequency_penalty = 0;
    float presence_penalty = 0;
    float dry_multiplier = 0;  // 0: off
    float dry_base = 1.75f;
    int64_t dry_allowed_length = 2;
    int64_t dry_last_n = 0;                             // as penalty_last_n
    std::shared_ptr<const Breakers> dry_breakers;       // null: none
    std::vector<std::pair<int32_t, float>> logit_bias;  // added first; -infinity bans a token

    bool is_active(Sampler sampler) const;
    // Number of last tokens of the text that the samplers depend on; -1: all.
    int64_t window() const;
};

struct Candidate {
    int32_t token;
    float logit;
    float prob;
};

struct Candidates {
    std::vector<Candidate> list;
    bool sorted = false;     // by descending logit
    bool has_ties = false;   // equal logits are adjacent, but not in llama.cpp's order
    bool cut_a_tie = false;  // a sampler removed one of two equal logits: which one depends on the order
    bool ends_in_tie = false;  // sorted, and a logit equal to the last one was removed: that matters while the last one stays
};

// The text before the token to be drawn.
struct Text {
    const int32_t * tokens;
    size_t n;
};

// Applies one sampler; an inactive sampler changes nothing.
void apply(Sampler sampler, const Sampling & sampling, const Text & text, Candidates & candidates);

// Applies a sampler that depends on the text (penalties, dry) to a row of logits (n_vocab).
void apply_to_row(Sampler sampler, const Sampling & sampling, const Text & text, float * logits, size_t n_vocab);

}  // namespace ggufspec
