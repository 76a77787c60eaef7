"""The nouns and the seams of speculative decoding. Knows token ids and arrays; no behaviour."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # (n, n_vocab), before sampling
Uniforms = Sequence[float]  # (n), uniforms in [0, 1)


class Probs(Protocol):
    """Distributions over the vocabulary, one a row; numpy.asarray(probs): (n, n_vocab) float32.

    A numpy array is one. The rows that come from `to_probs` are evaluated where they are asked for.
    """

    def __len__(self) -> int: ...

    def __array__(self, dtype: Any = ..., /) -> NDArray[Any]: ...


# After a pass over gigabytes of weights, nothing of Python is left in the processor's caches. So a
# text is an array, not a list of a thousand int objects, and the facts of a round are tuples.


def token_array(tokens: Iterable[int] = ()) -> array[int]:
    """Tokens side by side as int32; the same object where they are so already."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    return array("i", tokens)


def first_rows(rows: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The views rows[:0], rows[:1] ... rows, made once: at each round, a slice would cost more."""
    return [rows[:n] for n in range(len(rows) + 1)]


class Draft(NamedTuple):
    """Tokens that a drafter proposes.

    `probs` (n_draft, n_vocab) are the distributions that the tokens were really drawn from, after
    temperature and truncation; None says that every token was certain (argmax, n-gram).
    The array is valid until the drafter's next draft.
    `expected`: how many of them stand on average, where the drafter can tell. `why`: why no more.
    """

    tokens: Sequence[int]
    probs: Probs | None = None
    expected: float | None = None
    why: str = ""


class Verdict(NamedTuple):
    """What the target says of a draft: its first `n_accepted` stand, `next_token` follows."""

    n_accepted: int
    next_token: int


class Ask(NamedTuple):
    """What a text needs of the target next: logits as `Session.score(tokens, draft)` gives them."""

    tokens: Sequence[int]
    draft: Sequence[int]


class Scored(NamedTuple):
    """What came of it. `seconds`: of the pass, which `n_sharers` texts had together."""

    logits: Logits
    seconds: float
    n_sharers: int = 1


class Round(NamedTuple):
    """One turn of the loop. The last of `tokens` is the target's own, unless a stop came first.

    `target_seconds` are those of the pass, which `n_sharers` texts had together.
    """

    tokens: Sequence[int]
    n_drafted: int
    n_accepted: int
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    expected: float | None = None  # as the Draft has it
    why: str = ""
    n_sharers: int = 1

    @property
    def drafted(self) -> Sequence[bool]:
        """For each token, whether the drafter wrote it (and the target let it stand)."""
        return [i < self.n_accepted for i in range(len(self.tokens))]


class Session(Protocol):
    """A model as a function from tokens to logits; what it remembers is its own affair."""

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        `tokens` must not be empty. The array is valid until the next score.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens, and may learn from what became of them."""

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        """Propose 0 to `n_max` tokens to follow `tokens`."""
        ...

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn what the target thought of the draft, and what came of it."""
        ...


class Verify(Protocol):
    """A pure rule: which drafted tokens stand, and what follows them."""

    def __call__(self, draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        """Judge `draft` by `target_probs` (n_draft + 1, n_vocab) and `uniforms` (n_draft + 1)."""
        ...
