"""Accepts tokens that equal the target's own draws, as llama.cpp does; lossless for any draft."""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict

JUDGES_TREES = True


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Draw from the target after each accepted token; accept the child that has the drawn token."""
    target = as_rows(target_probs)
    return Verdict(*_native.match(draft.tokens, draft.parents, None, target, uniforms))
