"""Caches log-probabilities of recent prompts, because prompts of evaluations share prefixes."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ggufspec.decoding.types import n_same
from ggufspec.engine.engine import Engine
from ggufspec.engine.logprobs import TokenLogprobs, entry_of

_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities per prompt: 5 MB


class _Scored(NamedTuple):
    n_top: int
    tokens: array[int]
    logprobs: Sequence[TokenLogprobs]


class PromptScores:
    """Log-probabilities of the tokens of recent prompts, and of `n_top` alternatives to each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: deque[_Scored] = deque(maxlen=_N_KEPT)

    def known(self, tokens: Sequence[int], n_top: int) -> Sequence[TokenLogprobs]:
        """The known ones of a prompt's prefix: at least the first token, which has no value."""
        text = array("i", tokens)
        found = [TokenLogprobs(entry_of(tokens[0], None, self._engine.vocab), [])]
        for kept in self._kept:
            n = n_same(kept.tokens, text)
            if kept.n_top == n_top and n > len(found):
                found = list(kept.logprobs[:n])
        return found

    def keep(self, tokens: Sequence[int], n_top: int, found: Sequence[TokenLogprobs]) -> None:
        """Store the log-probabilities of a prompt, one for each token."""
        text = array("i", tokens)
        is_new = not any(kept.n_top == n_top and kept.tokens == text for kept in self._kept)
        if is_new and len(text) * (n_top + 1) <= _MOST_KEPT:
            self._kept.append(_Scored(n_top, text, found))
