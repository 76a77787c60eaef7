"""Which token follows which: one map for all stand-ins of a vocabulary, and a draft's share of it.

Knows numbers of tokens only. All of it comes from a hash of ours, so that two files that are
written on two machines agree: numpy does not promise its random numbers for ever.

The map is one long cycle through all words, so that no text runs into a loop. Where a draft
departs from it is decided along that cycle, in runs: so many tokens as the target has them, then
one that it has not. A run is over when a round is, whatever the draft's length, since the token
that broke it is the target's own. So acceptance depends on how long runs are, and on nothing else;
their lengths follow the geometric law that independent tokens would give, and are drawn with a
scrambled van der Corput sequence instead of independent numbers. So a text of 200 tokens is within
two points of the asked share (one standard deviation), where independent ones need a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Words", "codes", "follows", "successors"]

_N_SPECIAL = 258  # 256 bytes, the beginning and the end of a text
_PADDED = 1024  # sizes of one vocabulary differ in what fills them up; words end at a multiple
# Seeds of the hash, one for each use of it.
_ORDER, _ENTRY, _CHANCE, _RUNS, _FLIPS, _SHUFFLE, _CODE = range(1 << 40, 8 << 40, 1 << 40)
_BITS = 6  # a scrambled sequence has 64 members, then comes another
_SHUFFLED = 8
_LONGEST_RUN = 1 << 24


class Words(NamedTuple):
    """Which tokens of a vocabulary are words: from `start` to before `stop`."""

    start: int
    stop: int

    @classmethod
    def of(cls, n_vocab: int) -> Words:
        """Of vocabularies that differ in their padding only, the same."""
        return cls(_N_SPECIAL, n_vocab - n_vocab % _PADDED or n_vocab)


def successors(n_vocab: int, agreement: float) -> NDArray[np.int64]:
    """The token that follows each: (n_vocab,), always a word.

    Of all steps along the cycle, `agreement` are those of the map; the others lead elsewhere.
    Tokens that are no words (those of a prompt) lead onto the cycle, each to its own place.
    """
    import numpy as np

    words = Words.of(n_vocab)
    n = words.stop - words.start
    order = np.argsort(_hashed(np.arange(n, dtype=np.uint64), _ORDER), kind="stable") + words.start
    place = (_hashed(np.arange(n_vocab, dtype=np.uint64), _ENTRY) % np.uint64(n)).astype(np.int64)
    place[order] = np.arange(n)
    is_word = np.zeros(n_vocab, np.bool_)
    is_word[words.start : words.stop] = True
    agrees = np.where(is_word, follows(n, agreement)[place], _by_chance(n_vocab, agreement))
    return order[(place + 1 + np.where(agrees, 0, n // 2)) % n]  # type: ignore[no-any-return]


def follows(n: int, agreement: float) -> NDArray[np.bool_]:
    """Which of `n` steps along the cycle are those of the map."""
    import numpy as np

    steps = np.ones(n, np.bool_)
    if agreement < 1:
        log = np.log(agreement) if agreement > 0 else -np.inf
        lengths = np.minimum(np.log(_spread(n)) / log, _LONGEST_RUN).astype(np.int64)
        ends = np.cumsum(lengths + 1) - 1
        steps[ends[ends < n]] = False
    return steps


def codes(tokens: NDArray[np.int64], n: int) -> NDArray[np.int8]:
    """A row of signs for each token, -1 or 1, that no other token's is like: (len(tokens), n).

    The first is always 1: what every token has. Products of two rows are n, or about sqrt(n).
    """
    import numpy as np

    n_words = -(-n // 64)
    at = tokens.astype(np.uint64)[:, None] * np.uint64(n_words) + np.arange(n_words, dtype="u8")
    bits = np.unpackbits(_hashed(at, _CODE).astype("<u8").view(np.uint8), axis=1)[:, :n]
    bits[:, 0] = 1
    signs: NDArray[np.int8] = bits.view(np.int8) * np.int8(2) - np.int8(1)
    return signs


def _spread(n: int) -> NDArray[np.float64]:
    """(n,) numbers between 0 and 1 of which any few in a row are spread evenly.

    The van der Corput sequence; after Owen, each bit is flipped or not by a hash of those before.
    Each eight are shuffled, since one bit would make large and small ones take turns.
    """
    import numpy as np

    at = np.arange(-(-n // _SHUFFLED) * _SHUFFLED, dtype=np.uint64)
    shuffle = np.argsort(_hashed(at, _SHUFFLE).reshape(-1, _SHUFFLED), axis=1, kind="stable")
    at = np.take_along_axis(at.reshape(-1, _SHUFFLED), shuffle, axis=1).reshape(-1)[:n]
    member = at & np.uint64((1 << _BITS) - 1)
    found = _fractions(_hashed(at, _RUNS)) / (1 << _BITS)
    for bit in range(_BITS):
        before = member & np.uint64((1 << bit) - 1) | np.uint64(1 << bit)
        node = (at >> np.uint64(_BITS) << np.uint64(_BITS)) + before
        flip = _hashed(node, _FLIPS) & np.uint64(1)
        found += (member >> np.uint64(bit) & np.uint64(1) ^ flip) / (2 << bit)
    return found


def _by_chance(n: int, agreement: float) -> NDArray[np.bool_]:
    import numpy as np

    drawn = _fractions(_hashed(np.arange(n, dtype=np.uint64), _CHANCE))
    return drawn <= agreement if agreement > 0 else np.zeros(n, np.bool_)


def _fractions(hashed: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In (0, 1]."""
    import numpy as np

    return ((hashed >> np.uint64(11)) + np.uint64(1)) / float(1 << 53)  # type: ignore[no-any-return]


def _hashed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64: https://prng.di.unimi.it/splitmix64.c"""
    import numpy as np

    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return hashed
