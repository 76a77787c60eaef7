// The verification rules over distributions, uniforms in. Knows no strategy names, no RNG, no models.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling.h"

namespace ggufspec {

// What the target says of a draft: how many tokens of it stand, and the token that the target adds itself.
struct Verdict {
    int32_t n_accepted;
    int32_t next_token;
};

// One round to be judged.
struct Judged {
    const int32_t * tokens;  // (n_draft): the drafted tokens
    const Row * draft;       // (n_draft): what they were drawn from; null: every token was certain
    const Row * target;      // (n_draft + 1)
    const double * uniforms;    // (n_draft + 1): uniforms in [0, 1)
    size_t n_draft;
};

// Draws from the target at each position; a drafted token stands while it is the one that was drawn.
Verdict match(const Judged & judged);

// Token-wise rejection sampling: token x stands with probability min(1, target(x) / draft(x)); the first
// that falls is replaced by a draw from max(target - draft, 0), normalised.
// Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
Verdict rejection(const Judged & judged);

// Block verification: the draft is judged as a whole, and its longest prefix that passes stands.
// Sun et al., https://arxiv.org/abs/2403.10444
Verdict block(const Judged & judged);

// An estimate of how many tokens the block rule would keep if the draft had another temperature, from the tokens that
// were drawn at this one: importance weights for the way there, whole distributions for each step. The weights are cut,
// since a rare way with a large one would drown all others; so it errs, if at all, on the low side.
double expected_length(const Judged & judged, float temperature);

}  // namespace ggufspec
