"""Token-wise rejection sampling. Lossless for drafts that carry the distribution they came from.

Leviathan et al., https://arxiv.org/abs/2211.17192; Chen et al., https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.core import Coins, Draft, Probs, Verdict


def verify(draft: Draft, target_probs: Probs, coins: Coins) -> Verdict:
    """Token x stands with probability min(1, target(x) / draft(x)).

    The first that falls is replaced by a draw from max(target - draft, 0), normalised.
    """
    return Verdict(*_native.rejection(draft.tokens, draft.probs, target_probs, coins))
