"""Token-wise rejection sampling. Lossless for drafts that carry the distribution they came from.

Leviathan et al. (Google), https://arxiv.org/abs/2211.17192, and Chen et al. (DeepMind),
https://arxiv.org/abs/2302.01318, found it independently. The two descriptions are one
rule: the first calls the target p and the draft q and draws all uniforms of a round at once, the
second swaps the letters and draws one uniform after the other until one fails. Both accept by the
same ratio, replace a rejected token from the same residual distribution, and draw a bonus token
from the target where all were accepted.
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Token x stands with probability min(1, target(x) / draft(x)).

    The first that falls is replaced by a draw from max(target - draft, 0), normalised.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    return Verdict(*_native.rejection(draft.tokens, probs, as_rows(target_probs), uniforms))
