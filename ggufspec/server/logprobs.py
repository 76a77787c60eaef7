"""Computes the log-probabilities of prompts, in pieces between other texts."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from ggufspec.decoding.types import n_same
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.logprobs import TokenLogprobs, entry_of, logprobs_of

_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities of a prompt: 5 MB


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
        found = [TokenLogprobs(entry_of(tokens[0], None, vocab), [])]
        for kept in self._kept:
            n = n_same(kept.tokens, text)
            if kept.n_top == n_top and n > len(found):
                found = list(kept.logprobs[:n])
        is_new = len(found) < len(text)
        for rows in scoring.prompt_logits(self._engine.pair, tokens, len(found)):
            for row in rows:
                found.append(logprobs_of(row, tokens[len(found)], n_top, vocab))
            yield
        if is_new and len(text) * (n_top + 1) <= _MOST_KEPT:
            self._kept.append(_Scored(n_top, text, found))
        return found
