"""Traversal verification: judges whole paths of a tree; on a chain it is block verification.

Weng et al., https://arxiv.org/abs/2505.12398; on a chain: Sun et al.,
https://arxiv.org/abs/2403.10444
"""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict

JUDGES_TREES = True


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Accept the first path that passes: leaves from left to right, a node after its children.

    With ratio(child) = min(1, ratio(node) * target(token) / draft(token)) and ratio(text) = 1, a
    leaf passes with probability ratio(leaf). If it does not, its parent's target becomes
    max(ratio * target - draft, 0), normalised, and its ratio becomes excess / (excess + 1 - ratio),
    where excess is the sum before normalising; then its next child is tried, and after the last
    child the parent itself. The next token is drawn from the changed target after the path.

    On a chain, the longest prefix that passes is accepted, even if shorter ones do not. Certain
    tokens are accepted with their target probability; no lossless rule accepts more.
    """
    probs = None if draft.probs is None else as_rows(draft.probs)
    target = as_rows(target_probs)
    return Verdict(*_native.traversal(draft.tokens, draft.parents, probs, target, uniforms))
