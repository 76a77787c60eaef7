"""Caches log-probabilities of recent prompts, because prompts of evaluations share prefixes."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from ggufspec.decoding.types import n_same
from ggufspec.engine.engine import Engine
from ggufspec.engine.logprobs import TokenLogprobs, entry_of

_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities per prompt: 5 MB


class PromptScores:
    """Log-probabilities of the tokens of recent prompts, and of `n_top` alternatives to each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: deque[tuple[array[int], int, Sequence[TokenLogprobs]]] = deque(maxlen=_N_KEPT)

    def known(self, tokens: Sequence[int], n_top: int) -> Sequence[TokenLogprobs]:
        """The known ones of a prompt's prefix: at least the first token, which has no value."""
        text = array("i", tokens)
        found = [TokenLogprobs(entry_of(tokens[0], None, self._engine.vocab), [])]
        for kept, n_kept_top, logprobs in self._kept:
            n = n_same(kept, text)
            if n_kept_top == n_top and n > len(found):
                found = list(logprobs[:n])
        return found

    def keep(self, tokens: Sequence[int], n_top: int, found: Sequence[TokenLogprobs]) -> None:
        """Store the log-probabilities of a prompt, one for each token."""
        text = array("i", tokens)
        is_new = all(kept[:2] != (text, n_top) for kept in self._kept)
        if is_new and len(text) * (n_top + 1) <= _MOST_KEPT:
            self._kept.append((text, n_top, found))
