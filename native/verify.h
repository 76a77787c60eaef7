// The verification rules: they decide which drafted tokens are accepted. Random numbers are arguments.
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
    const int32_t * parents;  // (n_draft): the earlier node that each node follows, -1: the text; null: a chain
    const Row * draft;        // (n_draft): the rows they were drawn from, without earlier siblings; null: each was certain
    const Row * target;       // (n_draft + 1): rows after the text and after each node
    const double * uniforms;  // (n_draft + 1): uniforms in [0, 1)
    size_t n_draft;
};

// Draws from the target at each position, as long as the drawn token was drafted there.
Verdict match(const Judged & judged);

// Token-wise rejection sampling: token x is accepted with probability min(1, target(x) / draft(x)). After a rejection the
// target's distribution becomes max(target - draft, 0), normalised: for the next sibling or, after the last, for the draw.
// Chains: Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
// Trees: SpecInfer, https://arxiv.org/abs/2305.09781; without replacement: https://arxiv.org/abs/2402.14160
Verdict rejection(const Judged & judged);

// Traversal verification: tests whole paths, the leftmost first, then from its leaf upwards. On a chain it is block
// verification, which accepts the longest prefix that passes.
// Trees: Weng et al., https://arxiv.org/abs/2505.12398; chains: Sun et al., https://arxiv.org/abs/2403.10444
Verdict traversal(const Judged & judged);

}  // namespace ggufspec
