"""The tokens of DRY's sequence breakers, found in little time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from ggufspec.llama.breakers import Words, breakers_of

Found = dict[tuple[int, ...], set[int]]  # by the tokens that have to follow: first tokens


def tokenize(text: str) -> list[int]:
    """Nothing for a text that ends with "z", as if the vocabulary could not write it."""
    return [] if text.endswith("z") else [ord(char) for char in text]


def by_trying(texts: Sequence[str], words: Sequence[bytes]) -> Found:
    """As in llama.cpp, one token after the other."""
    found: Found = {}
    for data in [text.encode()[:40] for text in texts if text]:
        for token, word in enumerate(words):
            if data in word:
                found.setdefault((), set()).add(token)
                continue
            for n in range(1, min(len(word), len(data) - 1) + 1):
                if word.endswith(data[:n]) and (tail := tokenize(data[n:].decode())):
                    found.setdefault(tuple(tail[:20]), set()).add(token)
    return found


@pytest.mark.parametrize(
    "texts",
    [["a"], ["aab", "", "b"], ["abaz", "az"], ["abab" * 12], ["b" * 41], ["\xff"]],
    ids=str,
)
def test_the_tokens_are_those_that_hold_or_begin_a_breaker(texts: list[str]) -> None:
    rng = random.Random(1)
    words = [bytes(rng.choices(b"abz\xff", k=rng.randrange(6))) for _ in range(300)]
    words += [b"b" * 50, b"abab" * 12]
    found = breakers_of(texts, Words(words), tokenize)
    tails = {tuple(tail): set(heads.tolist()) for tail, heads in found}
    assert {tail: heads for tail, heads in tails.items() if heads} == by_trying(texts, words)
    assert all(heads.dtype == np.int32 for _, heads in found)


def test_sixteen_breakers_in_a_large_vocabulary_take_little_time() -> None:
    """0.01 s on a quiet core; trying each token takes seconds."""
    rng = random.Random(2)
    letters = b" etaoinshrdlcumfetaoins"
    words = [bytes(rng.choices(letters, k=6)) for _ in range(60_000)]
    prepared = Words(words)
    for texts in (["e" * 25 + chr(last) for last in letters[:16]], list(map(chr, letters[:16]))):
        began = time.thread_time()
        breakers_of(texts, prepared, tokenize)
        assert time.thread_time() - began < 0.3
