"""Logits -> log-probabilities of a token and of the likeliest ones. Knows no JSON, no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.llama.vocab import Vocab

_LEAST = -9999.0  # what OpenAI's API says of a chance of nothing


class Logprob(NamedTuple):
    """A token, and the logarithm of its chance."""

    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        r"""What the token shows; part of a character is told as OpenAI does: `bytes:\xe2\x80`."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)

    @property
    def n_chars(self) -> int:
        """How much longer a text becomes by it; part of a character counts as one."""
        return len(self.data.decode("utf-8", "replace"))


class TokenLogprobs(NamedTuple):
    """The chosen token, and the likeliest ones at its place."""

    chosen: Logprob
    top: Sequence[Logprob]


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int, vocab: Vocab) -> TokenLogprobs:
    """Of the distribution that these logits (n_vocab) are, at temperature 1, nothing truncated."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())

    def told(i: int) -> Logprob:
        value = float(wide[i])
        return Logprob(vocab.piece(i) or vocab.name(i).encode(), max(value, _LEAST))

    n_top = min(n_top, len(wide))
    likeliest = np.argpartition(-wide, n_top - 1)[:n_top] if n_top else np.zeros(0, np.intp)
    ordered = sorted(likeliest.tolist(), key=lambda i: (-wide[i], i))
    return TokenLogprobs(told(token), [told(i) for i in ordered])
