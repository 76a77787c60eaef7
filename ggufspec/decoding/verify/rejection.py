"""Token-wise rejection sampling: lossless if a draft has the distributions it was drawn from.

Leviathan et al. (Google), https://arxiv.org/abs/2211.17192, and Chen et al. (DeepMind),
https://arxiv.org/abs/2302.01318, found the same rule independently: both accept by the same ratio,
replace a rejected token from the same residual distribution, and draw a bonus token from the target
if all are accepted. Trees: SpecInfer, https://arxiv.org/abs/2305.09781; children that are drawn
without replacement: https://arxiv.org/abs/2402.14160.
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict

JUDGES_TREES = True


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Accept token x with probability min(1, target(x) / draft(x)).

    After a rejected token, max(target - draft, 0), normalised, replaces the target: to judge the
    next child of the same node or, after its last child, to draw the next token.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    target = as_rows(target_probs)
    return Verdict(*_native.rejection(draft.tokens, draft.parents, probs, target, uniforms))
