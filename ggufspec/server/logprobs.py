"""Computes log-probabilities: of tokens from logits, of prompts in pieces between other texts."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import n_same
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.llama.vocab import Vocab

_MIN_LOGPROB = -9999.0  # what OpenAI's API returns for a probability of 0
_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities of a prompt: 5 MB


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


class _Scored(NamedTuple):
    n_top: int
    tokens: array[int]
    logprobs: Sequence[TokenLogprobs]


class PromptScores:
    """Scores prompts, and keeps the last results: evaluations ask for prompts that begin alike."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: deque[_Scored] = deque(maxlen=_N_KEPT)

    def of(
        self, tokens: Sequence[int], n_top: int | None
    ) -> Generator[None, None, Sequence[TokenLogprobs]]:
        """One for each token, the first without a value; yields after each pass of the target.

        None if `n_top` is None.
        """
        if n_top is None:
            return ()
        vocab = self._engine.vocab
        text = array("i", tokens)
        found = [TokenLogprobs(_entry(tokens[0], None, vocab), [])]
        for kept in self._kept:
            n = n_same(kept.tokens, text)
            if kept.n_top == n_top and n > len(found):
                found = list(kept.logprobs[:n])
        is_new = len(found) < len(text)
        for rows in scoring.prompt_logits(self._engine, tokens, len(found)):
            for row in rows:
                found.append(logprobs_of(row, tokens[len(found)], n_top, vocab))
            yield
        if is_new and len(text) * (n_top + 1) <= _MOST_KEPT:
            self._kept.append(_Scored(n_top, text, found))
        return found


def _entry(token: int, logprob: float | None, vocab: Vocab) -> Logprob:
    data = vocab.piece(token)
    return Logprob(data, logprob, "" if data else vocab.name(token))
