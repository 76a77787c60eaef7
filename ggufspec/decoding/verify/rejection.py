"""Token-wise rejection sampling: lossless if a draft has the distributions it was drawn from.

Leviathan et al. (Google), https://arxiv.org/abs/2211.17192, and Chen et al. (DeepMind),
https://arxiv.org/abs/2302.01318, found the same rule independently: both accept by the same ratio,
replace a rejected token from the same residual distribution, and draw a bonus token from the target
if all are accepted.
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Accept token x with probability min(1, target(x) / draft(x)).

    The first rejected one is replaced by a draw from max(target - draft, 0), normalised.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    return Verdict(*_native.rejection(draft.tokens, probs, as_rows(target_probs), uniforms))
