"""Block verification: judges a draft as a whole; accepts at least as much as token by token.

Sun et al., https://arxiv.org/abs/2403.10444
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Accept the longest prefix of the draft that passes, whether or not shorter ones do.

    With ratio(i) = min(1, ratio(i - 1) * target(token i) / draft(token i)) and ratio(0) = 1, the
    prefix of i tokens passes with probability excess / (excess + 1 - ratio(i)), where excess is the
    sum of max(ratio(i) * target - draft, 0) over the distributions that follow it; the whole draft
    with ratio(n). After a prefix, the next token is drawn from max(ratio(i) * target - draft, 0),
    normalised.

    Certain tokens are accepted with the probability that the target gives them, which no lossless
    rule exceeds.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    return Verdict(*_native.block(draft.tokens, probs, as_rows(target_probs), uniforms))
