// The verification rules: which drafted tokens are accepted. Random numbers are arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling.h"

namespace ggufspec {

// How many drafted tokens are accepted, and the token that the target adds.
struct Verdict {
    int32_t n_accepted;
    int32_t next_token;
};

// One round to verify.
struct Judged {
    const int32_t * tokens;  // (n_draft): the drafted tokens
    const Row * draft;       // (n_draft): what they were drawn from; null: every token was certain
    const Row * target;      // (n_draft + 1)
    const double * uniforms;    // (n_draft + 1): uniforms in [0, 1)
    size_t n_draft;
};

// Draws from the target at each position; accepts drafted tokens as long as they equal the draws.
Verdict match(const Judged & judged);

// Token-wise rejection sampling: token x is accepted with probability min(1, target(x) / draft(x)); the
// first rejected one is replaced by a draw from max(target - draft, 0), normalised.
// Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
Verdict rejection(const Judged & judged);

// Block verification: judges the draft as a whole and accepts its longest prefix that passes.
// Sun et al., https://arxiv.org/abs/2403.10444
Verdict block(const Judged & judged);

// Estimates how many tokens block verification would accept if the draft had another temperature, from the tokens drawn at
// this one: importance weights for the prefix, whole distributions for each step. The weights are limited, since a rare
// prefix with a large one would dominate the mean; so the estimate is rather too low than too high.
double expected_length(const Judged & judged, float temperature);

}  // namespace ggufspec
