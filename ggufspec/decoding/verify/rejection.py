"""Token-wise rejection sampling. Lossless for drafts that carry the distribution they came from.

Leviathan et al. (Google), https://arxiv.org/abs/2211.17192, and Chen et al. (DeepMind),
https://arxiv.org/abs/2302.01318, found it independently. They differ in telling, not in law: the
first calls the target p and the draft q, tosses all coins of a round at once and takes the first
failure; the second calls them q and p, and tosses coin after coin until one fails. Both accept by
the same ratio, replace by the same residual, and draw one token more from the target where nothing
failed; so one rule serves for both.
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Coins, Draft, Probs, Verdict


def verify(draft: Draft, target_probs: Probs, coins: Coins) -> Verdict:
    """Token x stands with probability min(1, target(x) / draft(x)).

    The first that falls is replaced by a draw from max(target - draft, 0), normalised.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    return Verdict(*_native.rejection(draft.tokens, probs, as_rows(target_probs), coins))
