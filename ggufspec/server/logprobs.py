"""Computes log-probabilities of tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.llama.vocab import Vocab

_MIN_LOGPROB = -9999.0  # what OpenAI's API returns for a probability of 0


class Logprob(NamedTuple):
    """A token's bytes and its log-probability."""

    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        r"""The token as text; part of a character in OpenAI's form: `bytes:\xe2\x80`."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenLogprobs(NamedTuple):
    """The chosen token, and the most likely ones at its position."""

    chosen: Logprob
    top: Sequence[Logprob]


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int, vocab: Vocab) -> TokenLogprobs:
    """Log-probabilities at temperature 1, without truncation, from logits (n_vocab,)."""
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= np.log(np.exp(logprobs).sum())

    def entry(i: int) -> Logprob:
        value = float(logprobs[i])
        return Logprob(vocab.piece(i) or vocab.name(i).encode(), max(value, _MIN_LOGPROB))

    n_top = min(n_top, len(logprobs))
    top = np.argpartition(-logprobs, n_top - 1)[:n_top] if n_top else np.zeros(0, np.intp)
    ordered = sorted(top.tolist(), key=lambda i: (-logprobs[i], i))
    return TokenLogprobs(entry(token), [entry(i) for i in ordered])
