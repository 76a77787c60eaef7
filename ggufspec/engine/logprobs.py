"""Log-probabilities of tokens, by the target's logits."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import Draft, Probs, Uniforms, Verdict, Verify, n_same
from ggufspec.llama.vocab import Vocab

_N_KEPT = 8  # prompts
_MOST_KEPT = 20_000  # log-probabilities per prompt: 5 MB
_MIN_LOGPROB = -9999.0  # what OpenAI's API returns for a probability of 0


class Logprob(NamedTuple):
    """A token's bytes, its log-probability, its name if it has no bytes (a control token), its id.

    The log-probability of the first token of a prompt is None: nothing is before it.
    """

    data: bytes
    logprob: float | None
    name: str
    token: int

    @property
    def text(self) -> str:
        r"""The token as text; part of a character in OpenAI's form: `bytes:\xe2\x80`."""
        try:
            return self.data.decode("utf-8") or self.name
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class TokenLogprobs(NamedTuple):
    chosen: Logprob
    top: Sequence[Logprob]


def logprobs_of(logits: NDArray[np.float32], token: int, n_top: int, vocab: Vocab) -> TokenLogprobs:
    """Log-probabilities at temperature 1, without truncation, from logits (n_vocab,)."""
    best = int(np.argmax(logits))
    # Sums in 64 bits of exponentials in 32, which are computed four times as fast.
    total = float(logits[best]) + math.log(
        float(np.exp(logits - logits[best]).sum(dtype=np.float64))
    )

    def entry(i: int) -> Logprob:
        return entry_of(i, max(float(logits[i]) - total, _MIN_LOGPROB), vocab)

    top = [best] if n_top else []
    if n_top > 1:
        left = logits.copy()
        for _ in range(min(n_top, len(left)) - 1):  # faster than a partition, for these few
            left[top[-1]] = -np.inf
            top.append(int(left.argmax()))
    return TokenLogprobs(entry(token), [entry(i) for i in top])


def entry_of(token: int, logprob: float | None, vocab: Vocab) -> Logprob:
    data = vocab.piece(token)
    return Logprob(data, logprob, "" if data else vocab.name(token), token)


class SampledRows:
    """A rule of verification that keeps the distributions that it was called with."""

    def __init__(self, rule: Verify) -> None:
        self._rule = rule
        self.logprobs = np.empty((0, 0), np.float32)  # (n_draft + 1, n_vocab), of the last round

    def __call__(self, draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        with np.errstate(divide="ignore"):
            self.logprobs = np.log(np.asarray(target_probs))
        return self._rule(draft, target_probs, uniforms)


def logprobs_of_rows(
    rows: Sequence[NDArray[np.float32]], tokens: Sequence[int], n_top: int | None, vocab: Vocab
) -> tuple[TokenLogprobs, ...]:
    """One entry per token, from the logits that it was drawn from; () if `n_top` is None."""
    if n_top is None:
        return ()
    return tuple(
        logprobs_of(row, token, n_top, vocab) for row, token in zip(rows, tokens, strict=False)
    )


class PromptScores:
    """Log-probabilities of the tokens of recent prompts, and of `n_top` alternatives to each.

    Kept because prompts of evaluations share prefixes.
    """

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._kept: deque[tuple[array[int], int, Sequence[TokenLogprobs]]] = deque(maxlen=_N_KEPT)

    def known(self, tokens: Sequence[int], n_top: int) -> Sequence[TokenLogprobs]:
        """The known ones of a prompt's prefix: at least the first token, which has no value."""
        text = array("i", tokens)
        found = [TokenLogprobs(entry_of(tokens[0], None, self._vocab), [])]
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
