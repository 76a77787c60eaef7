"""What follows a text, guessed from itself. Pure: tokens in, tokens and their chances out.

The longest match of the text's end votes; what such votes are worth is learned from what came true.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.decoding.types import token_array

# Kinds of guesses: the shortest match of each kind, and the chance of a token that all votes are
# for, and of one that some are against, before anything was learned. About what was found in prose,
# and less than in code: a guess that was not made is soon made up for.
_KINDS = (
    (1, 0.15, 0.10),
    (2, 0.30, 0.20),
    (3, 0.45, 0.30),
    (4, 0.55, 0.40),
    (6, 0.65, 0.45),
    (9, 0.75, 0.55),
    (16, 0.85, 0.70),
)
_LENGTH_MOST = 32  # what a longer match counts as, in the extension
_TRUST = 6.0  # tokens of a kind after which what was seen outweighs what was thought before
_KEEP = 1 - 1 / 128  # of what a kind has seen, at each further token of it
_RATE = 0.1  # how fast the level of all kinds, as log-odds, follows what comes true


class Guess(NamedTuple):
    """Tokens that may follow a text, and for each its chance to stand if those before it do."""

    tokens: Sequence[int]
    chances: Sequence[float]


_NOTHING = Guess((), ())


class Guesser:
    """Guesses what follows a text, and learns how often it was right."""

    def __init__(self) -> None:
        self._ngrams = _native.Ngrams()
        self._chances = _Chances()
        self._last = _NOTHING
        self._kinds: Sequence[int] = ()  # of the last guess's tokens

    def guess(self, tokens: Sequence[int], n_max: int) -> Guess:
        """Up to `n_max` tokens to follow `tokens`; none where nothing like its end came before.

        Quickest where `tokens` is an array of int32 that goes on from the one before.
        """
        self._ngrams.update(token_array(tokens))  # type: ignore[arg-type]
        guessed, lengths, shares = self._ngrams.guess(n_max)
        self._kinds = [
            kind + (share < 1)
            for kind, share in zip(map(_KIND_OF.__getitem__, lengths), shares, strict=True)
        ]
        self._last = Guess(guessed, self._chances.of(self._kinds))
        return self._last

    def learn(self, guess: Guess, n_drafted: int, n_accepted: int) -> None:
        """The first `n_drafted` tokens of the last guess were drafted, `n_accepted` of them stood.

        Guesses before the last teach nothing, nor does one for the second time.
        """
        if guess is not self._last:
            return
        self._ngrams.observe(n_accepted, n_drafted)
        # The first that did not stand tells as well; those behind it do not.
        self._chances.learn(self._kinds[: min(n_drafted, n_accepted + 1)], n_accepted)
        self._last = _NOTHING


class _Chances:
    """How often tokens of each kind stand: what is thought of it, moved by what was seen."""

    def __init__(self) -> None:
        self._odds = [math.log(p / (1 - p)) for _, *both in _KINDS for p in both]
        self._level = 0.0  # of this text, above or below what is thought of texts; as log-odds
        self._n_right = [0.0] * len(self._odds)
        self._n_seen = [0.0] * len(self._odds)

    def of(self, kinds: Sequence[int]) -> Sequence[float]:
        """The chance of a token of each of these kinds."""
        chances = {kind: self._chance(kind) for kind in set(kinds)}
        return [chances[kind] for kind in kinds]

    def learn(self, kinds: Sequence[int], n_right: int) -> None:
        """Tokens of these kinds were tried, one behind the other; the first `n_right` stood."""
        for i, kind in enumerate(kinds):
            right = i < n_right
            self._n_right[kind] = _KEEP * self._n_right[kind] + right
            self._n_seen[kind] = _KEEP * self._n_seen[kind] + 1
            self._level += _RATE * (right - self._thought(kind))

    def _thought(self, kind: int) -> float:
        return 1 / (1 + math.exp(-self._odds[kind] - self._level))

    def _chance(self, kind: int) -> float:
        return (_TRUST * self._thought(kind) + self._n_right[kind]) / (_TRUST + self._n_seen[kind])


def _kind_of(length: int) -> int:
    """Of a match that long with all votes for it; one with some against is the next kind."""
    return 2 * max(i for i, (shortest, *_) in enumerate(_KINDS) if shortest <= max(length, 1))


_KIND_OF = tuple(_kind_of(length) for length in range(_LENGTH_MOST + 1))
