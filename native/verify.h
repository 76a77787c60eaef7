// The verification rules: which drafted tokens are accepted. Random numbers are arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling.h"

namespace ggufspec {

// The last accepted node, -1 if there is none, and the token that the target adds after it.
struct Verdict {
    int32_t node;
    int32_t next_token;
};

// One round to verify: a chain of tokens, or a tree.
struct Judged {
    const int32_t * tokens;   // (n_draft): the drafted tokens
    const int32_t * parents;  // (n_draft): the earlier node that each follows, -1: the text; null: a chain
    const Row * draft;        // (n_draft): what they were drawn from, without the siblings before; null: each was certain
    const Row * target;       // (n_draft + 1): after the text, after each node
    const double * uniforms;  // (n_draft + 1): uniforms in [0, 1)
    size_t n_draft;
};

// Draws from the target at each position; goes on as long as the token that is drawn was drafted there.
Verdict match(const Judged & judged);

// Token-wise rejection sampling: token x is accepted with probability min(1, target(x) / draft(x)). After a rejection the
// target's distribution becomes max(target - draft, 0), normalised, for the next sibling and, behind the last, for a draw.
// Chains: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
// Trees: SpecInfer, https://arxiv.org/abs/2305.09781; without replacement: https://arxiv.org/abs/2402.14160
Verdict rejection(const Judged & judged);

// Traversal verification: tests whole paths, the leftmost first, then from its leaf upwards. On a chain it is block
// verification, which accepts the longest prefix that passes.
// Trees: Weng et al., https://arxiv.org/abs/2505.12398; chains: Sun et al., https://arxiv.org/abs/2403.10444
Verdict traversal(const Judged & judged);

// Estimates how many tokens of a chain block verification would accept if the draft had another temperature, from the tokens drawn at
// this one: importance weights for the prefix, whole distributions for each step. The weights are limited, since a rare
// prefix with a large one would dominate the mean; so the estimate is rather too low than too high.
double expected_length(const Judged & judged, float temperature);

}  // namespace ggufspec
