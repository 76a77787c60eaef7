"""Finds the tokens that hold, or begin, the sequence breakers of DRY."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# As in llama.cpp: longer sequence breakers are cut.
_MAX_BYTES = 40
_MAX_TOKENS = 20


class Words:
    """The texts of all tokens, prepared for searches. Making it takes 0.2 s for 150,000 tokens."""

    def __init__(self, words: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        self.n_words = len(words)
        self._bytes = np.frombuffer(b"".join(words) + bytes(_MAX_BYTES), np.uint8)
        self._owners = np.repeat(np.arange(len(words), dtype=np.int32), lengths)  # of each byte
        backwards = sorted((word[::-1], token) for token, word in enumerate(words))
        self._backwards = [word for word, _ in backwards]
        self._tokens = np.fromiter((token for _, token in backwards), np.int32, len(words))

    def with_text(self, text: bytes) -> NDArray[np.int32]:
        """The tokens that contain `text` (1 to 40 bytes); some of them several times."""
        at = np.flatnonzero(self._bytes[: len(self._owners) - len(text) + 1] == text[0])
        for i, byte in enumerate(text[1:], 1):
            at = at[self._bytes[at + i] == byte]
        owners, lasts = self._owners[at], self._owners[at + len(text) - 1]
        found: NDArray[np.int32] = owners[owners == lasts]
        return found

    def with_end(self, end: bytes) -> NDArray[np.int32]:
        first = end[::-1]
        after = bisect_left(self._backwards, first + b"\xff" * _MAX_BYTES)
        return self._tokens[bisect_left(self._backwards, first) : after]


def breakers_of(
    texts: Sequence[str], words: Words, tokenize: Callable[[str], Sequence[int]]
) -> list[tuple[list[int], NDArray[np.int32]]]:
    """The breakers as tokens: (tokens that have to follow, the tokens that they may follow).

    A token that contains a breaker needs no further tokens; one that ends with the start of a
    breaker needs the rest. `tokenize` returns nothing for a text that the vocabulary cannot write.
    Source: llama.cpp's get_overlapping_token_sequences.
    """
    found: dict[tuple[int, ...], NDArray[np.bool_]] = {}  # by tail: which tokens are first ones

    def flags_of(tail: Sequence[int]) -> NDArray[np.bool_]:
        key = tuple(tail[:_MAX_TOKENS])
        return found.setdefault(key, np.zeros(words.n_words, np.bool_))

    for data in {text.encode("utf-8", "replace")[:_MAX_BYTES] for text in texts} - {b""}:
        is_whole = np.zeros(words.n_words, np.bool_)
        is_whole[words.with_text(data)] = True
        np.logical_or(flags := flags_of(()), is_whole, out=flags)
        for n in range(1, len(data)):
            heads = words.with_end(data[:n])
            heads = heads[~is_whole[heads]]
            if heads.size and (tail := tokenize(data[n:].decode("utf-8", "replace"))):
                flags_of(tail)[heads] = True
    return [(list(tail), np.flatnonzero(flags).astype(np.int32)) for tail, flags in found.items()]
