"""The next-token table of stand-ins and a draft's errors in it, made by hashing: see the guide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_N_SPECIAL = 258  # 256 bytes, and the tokens for the beginning and the end of a text
_PADDED = 1024  # words end at a multiple of this, so that padding does not change them
# Seeds of the hash, one for each purpose.
_ORDER, _ENTRY, _CHANCE, _RUNS, _SHUFFLE, _CODE = range(1 << 40, 7 << 40, 1 << 40)
_GROUP = 32  # of 8 to 64, the size with which short texts show the agreement best
_LONGEST_RUN = 1 << 24


def words_of(n_vocab: int) -> range:
    """The tokens that are words; the same for vocabularies that differ only in their padding."""
    return range(_N_SPECIAL, n_vocab - n_vocab % _PADDED or n_vocab)


def successors(n_vocab: int, agreement: float) -> NDArray[np.int64]:
    """The successor of each token: (n_vocab,), always a word.

    The share `agreement` of the words is followed by the next word of the cycle, the other words by
    a wrong one. Tokens that are not words (as in a prompt) are followed by various words.
    """
    words = words_of(n_vocab)
    n = len(words)
    order = np.argsort(_hashed(np.arange(n, dtype=np.uint64), _ORDER), kind="stable") + words.start
    place = (_hashed(np.arange(n_vocab, dtype=np.uint64), _ENTRY) % np.uint64(n)).astype(np.int64)
    place[order] = np.arange(n)
    is_word = np.zeros(n_vocab, np.bool_)
    is_word[words.start : words.stop] = True
    drawn = _fractions(_hashed(np.arange(n_vocab, dtype=np.uint64), _CHANCE))
    by_chance = (drawn <= agreement) & (agreement > 0)
    agrees = np.where(is_word, is_right(n, agreement)[place], by_chance)
    return order[(place + 1 + np.where(agrees, 0, n // 2)) % n]  # type: ignore[no-any-return]


def is_right(n: int, agreement: float) -> NDArray[np.bool_]:
    """For each of `n` places in the cycle, whether the next word follows: (n,)."""
    steps = np.ones(n, np.bool_)
    if agreement < 1:
        log = np.log(agreement) if agreement > 0 else -np.inf
        lengths = np.minimum(np.log(_spread(n)) / log, _LONGEST_RUN).astype(np.int64)
        ends = np.cumsum(lengths + 1) - 1
        steps[ends[ends < n]] = False
    return steps


def codes(tokens: NDArray[np.int64], n: int) -> NDArray[np.int8]:
    """Nearly orthogonal rows of -1 or 1, one per token: (len(tokens), n).

    The product of a row with itself is n, with another about sqrt(n). The first column is 1.
    """
    n_words = -(-n // 64)
    at = tokens.astype(np.uint64)[:, None] * np.uint64(n_words) + np.arange(n_words, dtype="u8")
    bits = np.unpackbits(_hashed(at, _CODE).astype("<u8").view(np.uint8), axis=1)[:, :n]
    bits[:, 0] = 1
    signs: NDArray[np.int8] = bits.view(np.int8) * np.int8(2) - np.int8(1)
    return signs


def _spread(n: int) -> NDArray[np.float64]:
    """(n,) numbers between 0 and 1; each group of successive ones has one in each equal part."""
    at = np.arange(-(-n // _GROUP) * _GROUP, dtype=np.uint64)
    ranks = _hashed(at, _SHUFFLE).reshape(-1, _GROUP).argsort(axis=1, kind="stable").reshape(-1)
    return (ranks + _fractions(_hashed(at, _RUNS)))[:n] / _GROUP


def _fractions(hashed: NDArray[np.uint64]) -> NDArray[np.float64]:
    return ((hashed >> np.uint64(11)) + np.uint64(1)) / float(1 << 53)  # type: ignore[no-any-return]


def _hashed(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64: https://prng.di.unimi.it/splitmix64.c"""
    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return hashed
