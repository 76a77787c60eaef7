"""Equality with the target's own draw at each position, as in llama.cpp. Lossless for any draft."""

from __future__ import annotations

from ggufspec import _native
from ggufspec.decoding.sampling import as_rows
from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """Draw from the target at each position; a drafted token stands while it is the one drawn."""
    return Verdict(*_native.match(draft.tokens, None, as_rows(target_probs), uniforms))
