"""A faulty verification rule for tests of the audit: it accepts 1.3 times as often as is lossless.

tests/conftest.py adds this folder to those where rules are found, so that `_lossy` is one by name.
"""

from __future__ import annotations

import numpy as np

from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict

_GREED = 1.3


def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
    """As `rejection`, but accepts token x with probability min(1, 1.3 * target(x) / draft(x))."""
    target = np.asarray(target_probs).astype(np.float64)
    tokens = [int(token) for token in draft.tokens]
    for i, token in enumerate(tokens):
        proposed = (
            np.eye(target.shape[1])[token]
            if draft.probs is None
            else np.asarray(draft.probs)[i].astype(np.float64)
        )
        if uniforms[i] * proposed[token] >= _GREED * target[i, token]:
            residual = np.maximum(target[i] - proposed, 0)
            return Verdict(i, _pick(residual if residual.any() else target[i], uniforms[i + 1]))
    return Verdict(len(tokens), _pick(target[-1], uniforms[len(tokens)]))


def _pick(weights: np.ndarray[tuple[int, ...], np.dtype[np.float64]], uniform: float) -> int:
    sums = np.cumsum(weights)
    return int(min(np.searchsorted(sums, uniform * sums[-1], side="right"), len(sums) - 1))
