"""The cache of texts that have left their slots: what it keeps, drops and gives back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ggufspec.engine.prompt_cache import CachedText, PromptCache
from ggufspec.llama.saved_text import SavedText

MIB = 2**20


def text_of(tokens: Sequence[int], n_bytes: int = 1000, n_least: int = 0) -> CachedText:
    cells = np.zeros(n_bytes, np.uint8)
    return CachedText(array("i", tokens), [SavedText(array("i", tokens), cells, n_least=n_least)])


def size_of(n_tokens: int, n_bytes: int = 1000) -> int:
    return text_of(range(n_tokens), n_bytes).n_bytes


def test_the_text_with_the_longest_beginning_is_taken_out() -> None:
    cache = PromptCache(MIB)
    texts = [text_of(each) for each in ([1, 2, 3, 4], [1, 2, 9], [5, 6])]
    for text in texts:
        cache.add(text)
    assert cache.take([1, 2, 3, 8, 8], 0) is texts[0]
    assert cache.take([1, 2, 3, 8, 8], 0) is texts[1]
    assert cache.take([1, 2, 3, 8, 8], 0) is None
    assert cache.n_texts == 1


def test_a_text_of_which_no_more_is_used_stays() -> None:
    cache = PromptCache(MIB)
    cache.add(text_of([1, 2, 3]))
    assert cache.take([1, 2, 4], 2) is None
    assert cache.take([7], 0) is None
    assert cache.n_texts == 1


def test_those_that_were_used_longest_ago_are_dropped_for_room() -> None:
    cache = PromptCache(3 * size_of(3))
    texts = [text_of([i, 2, 3]) for i in range(3)]
    for text in texts:
        cache.add(text)
    taken = cache.take([0, 2, 3], 0)
    assert taken is not None
    cache.add(taken)
    cache.add(text_of([3, 2, 3]))
    assert cache.n_held <= cache.n_bytes
    assert cache.take([1, 2, 3], 0) is None
    assert cache.take([0, 2, 3], 0) is taken


def test_room_is_made_before_a_text_is_copied() -> None:
    cache = PromptCache(3 * size_of(3))
    texts = [text_of([i, 2, 3]) for i in range(3)]
    for text in texts:
        cache.add(text)
    assert cache.make_room(array("i", [7, 8]), 2 * size_of(3))
    assert cache.n_held + 2 * size_of(3) <= cache.n_bytes
    assert cache.take([2, 2, 3], 0) is texts[2], "the others were used longer ago"


def test_no_room_is_made_for_a_text_that_is_larger_than_the_cache() -> None:
    cache = PromptCache(3 * size_of(3))
    cache.add(text_of([1, 2, 3]))
    assert not cache.make_room(array("i", [7, 8]), cache.n_bytes + 1)
    assert cache.n_texts == 1


def test_a_text_that_a_longer_one_can_replace_is_not_copied() -> None:
    cache = PromptCache(2 * size_of(3))
    texts = [text_of([1, 2, 3]), text_of([4, 5, 6])]
    for text in texts:
        cache.add(text)
    assert not cache.make_room(array("i", [1, 2]), size_of(2))
    assert cache.make_room(array("i", [7]), size_of(3))
    assert cache.take([1, 2, 3], 0) is texts[0], "it was used since the other one"


def test_a_text_takes_the_room_of_those_that_begin_it() -> None:
    cache = PromptCache(2 * size_of(3))
    texts = [text_of([4, 5, 6]), text_of([1, 2, 3])]
    for text in texts:
        cache.add(text)
    assert cache.make_room(array("i", [1, 2, 3, 4]), size_of(3))
    assert cache.take([4, 5, 6], 0) is texts[0]


def test_a_text_that_begins_another_one_is_dropped() -> None:
    for order in (1, -1):
        cache = PromptCache(MIB)
        for tokens in [[1, 2, 3], [1, 2, 3, 4]][::order]:
            cache.add(text_of(tokens))
        assert cache.n_texts == 1
        taken = cache.take([1, 2, 3, 4, 5], 0)
        assert taken is not None
        assert list(taken.tokens) == [1, 2, 3, 4]


def test_but_not_if_the_longer_one_cannot_go_back_to_it() -> None:
    cache = PromptCache(MIB)
    for tokens in ([1, 2, 3, 4], [1, 2, 3]):
        cache.add(text_of(tokens, n_least=len(tokens)))
    assert cache.n_texts == 2
    taken = cache.take([1, 2, 3, 9], 0)
    assert taken is not None
    assert list(taken.tokens) == [1, 2, 3]


def test_a_text_is_taken_where_copying_is_faster_than_reading() -> None:
    for seconds, is_taken in ((0.5, True), (2.0, False)):
        cache = PromptCache(MIB)
        text = text_of(range(100))
        cache.add(text)
        cache.observe_copy(text.n_bytes, seconds)
        cache.observe_reading(1000, 10.0)
        assert (cache.take(range(100), 0) is not None) is is_taken
        assert cache.take(range(1000, 1100), 0) is None
    cache.observe_copy(text.n_bytes, 0.0)  # it is learned
    for _ in range(20):
        cache.observe_copy(text.n_bytes, 0.001)
    assert cache.take(range(100), 0) is text
