// The verification rules over rows of probabilities, coins in. Knows no strategy names, no RNG, no models.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ggufspec {

// What the target says of a draft: how many tokens of it stand, and the token that the target adds itself.
struct Verdict {
    int32_t n_accepted;
    int32_t next_token;
};

// One round to be judged.
struct Judged {
    const int32_t * tokens;      // (n_draft): the drafted tokens
    const float * draft_probs;   // (n_draft, n_vocab): what they were drawn from; null: every token was certain
    const float * target_probs;  // (n_draft + 1, n_vocab)
    const double * coins;        // (n_draft + 1): uniforms in [0, 1)
    size_t n_draft;
    size_t n_vocab;
};

// Draws from the target at each position; a drafted token stands while it is the one that was drawn.
Verdict match(const Judged & judged);

// Token-wise rejection sampling: token x stands with probability min(1, target(x) / draft(x)); the first
// that falls is replaced by a draw from max(target - draft, 0), normalised.
// Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
Verdict rejection(const Judged & judged);

}  // namespace ggufspec
