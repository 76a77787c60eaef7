"""Computes log-probabilities of tokens from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.llama.vocab import Vocab

_MIN_LOGPROB = -9999.0  # what OpenAI's API returns for a probability of 0


class Logprob(NamedTuple):
    """A token's bytes, its log-probability, and its name if it has no bytes: a control token.

    The log-probability of the first token of a prompt is None: nothing is before it.
    """

    data: bytes
    logprob: float | None
    name: str = ""

    @property
    def text(self) -> str:
        r"""The token as text; part of a character in OpenAI's form: `bytes:\xe2\x80`."""
        try:
            return self.data.decode("utf-8") or self.name
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenLogprobs(NamedTuple):
    """The chosen token, and the most likely ones at its position."""

    chosen: Logprob
    top: Sequence[Logprob]


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int, vocab: Vocab) -> TokenLogprobs:
    """Log-probabilities at temperature 1, without truncation, from logits (n_vocab,)."""
    best = int(logits.argmax())
    # Sums in 64 bits of exponentials in 32, which are computed four times as fast.
    total = float(logits[best]) + math.log(
        float(np.exp(logits - logits[best]).sum(dtype=np.float64))
    )

    def entry(i: int) -> Logprob:
        return _entry(i, max(float(logits[i]) - total, _MIN_LOGPROB), vocab)

    if n_top <= 1:
        return TokenLogprobs(entry(token), [entry(best)] * n_top)
    top = np.argpartition(-logits, min(n_top, len(logits)) - 1)[:n_top]
    ordered = sorted(top.tolist(), key=lambda i: (-logits[i], i))
    return TokenLogprobs(entry(token), [entry(i) for i in ordered])


def unscored(token: int, vocab: Vocab) -> TokenLogprobs:
    """The first token of a prompt."""
    return TokenLogprobs(_entry(token, None, vocab), [])


def _entry(token: int, logprob: float | None, vocab: Vocab) -> Logprob:
    data = vocab.piece(token)
    return Logprob(data, logprob, "" if data else vocab.name(token))
