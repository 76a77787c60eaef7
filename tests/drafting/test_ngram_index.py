"""The continuation of a text is predicted from its longest matches, with learned probabilities."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from ggufspec._native import Ngrams, SortedTexts
from ggufspec.drafting import constants
from ggufspec.drafting.strategies.ngram import Continuation, NgramIndex, Origin, TextStore

LENGTH_MOST = 32
SOURCES_MOST = 32
OLDER = 0.85
OTHER = 10**6  # a token that no run has


def index() -> Ngrams:
    return Ngrams(constants.NGRAM_PRIORS, constants.NGRAM_PRIOR_WEIGHT)


class NaiveNgrams:
    """The rule itself, without an index: every earlier place is compared with the text's end."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.right: dict[int, int] = {}
        self.wrong: dict[int, int] = {}
        self.votes: list[list[tuple[int, bool]]] = []

    def update(self, tokens: Sequence[int]) -> int:
        pairs = zip(self.text, tokens, strict=False)
        n_common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        n_common = min(len(self.text), len(tokens)) if n_common is None else n_common
        self.text = list(tokens)
        for counts in self.right, self.wrong:
            for place in [place for place in counts if place >= n_common]:
                del counts[place]
        return n_common

    def predict(self, n_most: int) -> tuple[list[int], list[int], list[float]]:
        self.votes = []
        predicted: list[int] = []
        shares = []
        lengths = {place: self.match_length(place) for place in range(1, len(self.text))}
        longest = max(lengths.values(), default=0)
        if longest == 0:
            return [], [], []
        places = [p for p in reversed(lengths) if lengths[p] == longest]
        weights = [1.0]
        while len(weights) < len(places):
            weights.append(weights[-1] * OLDER)
        for _ in range(n_most):
            choices: dict[int, float] = {}
            everything = 0.0
            text = self.text + predicted
            for place, weight in zip(places, weights, strict=True):
                right, wrong = self.right.get(place, 0), self.wrong.get(place, 0)
                belief = (right + 1) / (right + wrong + 2)
                choices[text[place]] = choices.get(text[place], 0.0) + weight * belief
                everything += weight * max(belief, 1 - belief)
            best = max(choices, key=choices.__getitem__)
            self.votes.append([(place, text[place] == best) for place in places])
            kept = [i for i, place in enumerate(places) if text[place] == best]
            places, weights = [places[i] + 1 for i in kept], [weights[i] for i in kept]
            predicted.append(best)
            shares.append(choices[best] / everything)
        return predicted, [min(longest + i, LENGTH_MOST) for i in range(n_most)], shares

    def observe(self, n_accepted: int, n_tried: int) -> None:
        for i, votes in enumerate(self.votes[: min(n_tried, n_accepted + 1)]):
            for place, agrees in votes:
                if place >= len(self.text):
                    continue
                if i < n_accepted:
                    counts = self.right if agrees else self.wrong
                    counts[place] = counts.get(place, 0) + 1
                elif agrees:
                    self.wrong[place] = self.wrong.get(place, 0) + 1

    def match_length(self, place: int) -> int:
        n = 0
        while n < min(place, LENGTH_MOST) and self.text[place - 1 - n] == self.text[-1 - n]:
            n += 1
        return n


def after(text: Sequence[int], n_most: int = 1) -> list[int]:
    ngrams = index()
    ngrams.update(array("i", text))
    return ngrams.predict(n_most)[0]


@pytest.mark.parametrize("n_kinds", [1, 2, 6, 15])
def test_the_index_finds_what_a_full_comparison_finds(n_kinds: int) -> None:
    """Over texts that grow, are cut back and replaced, and predictions that are right or not."""
    rng = np.random.default_rng(n_kinds)
    ngrams, naive = index(), NaiveNgrams()
    text = array("i")
    # No more places of any token than are looked at: then the index leaves none out.
    n_text_most = SOURCES_MOST if n_kinds < 15 else 250
    for _ in range(800):
        if rng.random() < 0.1:
            text = text[: rng.integers(0, len(text) + 1)]
        if len(text) and rng.random() < 0.3:  # repeat what was there, for long matches
            start = rng.integers(0, len(text))
            text += text[start : start + rng.integers(1, 60)]
        else:
            text.extend(rng.integers(0, n_kinds, rng.integers(0, 4)).tolist())
        if len(text) > n_text_most or (text and max(map(text.count, text)) > SOURCES_MOST):
            text = text[: n_text_most // 2]
        assert ngrams.update(text) == naive.update(text)
        n_most = int(rng.integers(0, 8))
        tokens, _, lengths, shares, _ = ngrams.predict(n_most)
        assert (tokens, lengths, shares) == naive.predict(n_most)
        assert set(tokens) <= set(text)
        n_tried = int(rng.integers(0, len(tokens) + 1))
        n_accepted = int(rng.integers(0, n_tried + 1))
        ngrams.observe(n_accepted, n_tried)
        naive.observe(n_accepted, n_tried)


def test_what_is_left_out_of_many_matches_are_the_oldest() -> None:
    """A longer match is not missed for it: it is found by more than its last token."""
    many = [token for i in range(100) for token in (5, 100 + i)]
    assert after([5, 7, *many, 5]) == [199]
    assert after([4, 5, 7, *many, 4, 5]) == [7]


def test_a_text_that_grew_is_indexed_as_one_read_at_once() -> None:
    """Across the sizes at which the index takes more room, and back."""
    text = array("i", np.random.default_rng(0).integers(0, 3000, 70_000).tolist())
    grown = index()
    for n in [*range(1, 70_000, 997), 70_000, 33_000, 12_345, 20, 40_000]:
        grown.update(text[:n])
        at_once = index()
        if n in (15_953, 31_905, 70_000, 33_000, 12_345, 20, 40_000):
            at_once.update(text[:n])
            assert grown.predict(5) == at_once.predict(5)


@pytest.mark.parametrize("period", [1, 3, 40_000])
def test_a_long_text_costs_little(period: int) -> None:
    text = array("i", [i % period for i in range(32_768)])
    ngrams = index()
    start = time.thread_time()
    ngrams.update(text)
    for i in range(100):
        text.append(i % period)
        assert ngrams.update(text) == len(text) - 1
        ngrams.predict(8)
    assert time.thread_time() - start < 1.0  # some 0.01
    assert ngrams.n_compared <= 40 * len(text)


def test_no_more_is_looked_at_where_most_matches_are_shorter_than_the_longest() -> None:
    many = [token for i in range(10_000) for token in (100 + i, 1, 2)]
    ngrams = index()
    ngrams.update(array("i", [*many, 9, 1, 2, 7, 9, 1, 2]))
    before = ngrams.n_compared
    assert ngrams.predict(1)[:3:2] == ([7], [3])
    assert ngrams.n_compared - before <= 100


@pytest.mark.parametrize(("n_accepted", "n_tried"), [(0, 4), (2, 1), (4, 4)])
def test_more_than_was_predicted_cannot_be_observed(n_accepted: int, n_tried: int) -> None:
    ngrams = index()
    ngrams.update(array("i", [1, 2, 1]))
    ngrams.predict(3)
    with pytest.raises(ValueError, match="observe"):
        ngrams.observe(n_accepted, n_tried)
    ngrams.observe(0, 3)
    with pytest.raises(ValueError, match="observe"):  # it is forgotten
        ngrams.observe(0, 1)


def rounds(
    ngram_index: NgramIndex, length: int, truth: float, n: int, seed: int = 0
) -> Continuation:
    """Each round a new text whose end has one match, which is right with probability `truth`."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        run = [10 * i + j for j in range(length)]
        prediction = ngram_index.predict([*run, OTHER, *run], 1)
        assert prediction.tokens == [OTHER]
        ngram_index.observe(int(rng.random() < truth), 1)
    return prediction


@pytest.mark.parametrize("length", [1, 25])
@pytest.mark.parametrize("truth", [0.05, 0.95])
def test_probabilities_converge_to_observed_frequencies(length: int, truth: float) -> None:
    chances = [rounds(NgramIndex(), length, truth, 400, seed).probs[0] for seed in range(10)]
    # A standard error of 0.012 at the most, and what was thought before weighs a twentieth.
    assert abs(float(np.mean(chances)) - truth) < 0.04


def test_each_kind_of_match_has_a_chance_of_its_own() -> None:
    ngram_index = NgramIndex()
    for seed in range(20):
        short = rounds(ngram_index, 2, 0.1, 20, seed)
        long = rounds(ngram_index, 9, 0.9, 20, seed + 100)
    assert 0.06 < short.probs[0] < 0.13
    assert 0.86 < long.probs[0] < 0.94


def test_longer_and_undisputed_matches_have_the_better_chances_at_first() -> None:
    text = list(range(40)) * 2
    chances = NgramIndex().predict(text[:41], 39).probs
    assert list(chances) == sorted(chances)
    assert chances[0] < 0.4 < 0.9 < chances[-1]
    disputed = NgramIndex().predict([5, 1, 6, 5, 2, 7, 5], 1).probs
    assert disputed[0] < chances[0]


def test_only_verified_tokens_are_learned_from() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]

    def probs_after(n_predicted: int, n_tried: int, n_accepted: int) -> Sequence[float]:
        ngram_index = NgramIndex()
        ngram_index.predict(text, n_predicted)
        ngram_index.observe(n_accepted, n_tried)
        other = [11, 12, 13, 14, 15, 11]  # where no source was ever right or wrong
        return ngram_index.predict(other, 5).probs

    assert probs_after(4, 0, 0) == NgramIndex().predict([11, 12, 13, 14, 15, 11], 5).probs
    assert probs_after(4, 4, 1) == probs_after(4, 2, 1)
    assert probs_after(4, 2, 2) == probs_after(2, 2, 2)
    assert probs_after(4, 2, 2) != probs_after(4, 3, 2)


def test_a_prediction_is_drafted_from_its_start_and_again_behind_an_edit() -> None:
    prompt, prediction = [*range(100, 140)], [*range(1, 41)]
    index = NgramIndex(prediction)
    written = array("i", prompt)
    assert list(index.predict(written, 8).tokens) == prediction[:8]
    written.extend(prediction[:10])
    assert list(index.predict(written, 8).tokens) == prediction[10:18]
    written.extend([90, 91])  # instead of 11 and 12
    assert not index.predict(written, 8).tokens, "nothing like it came before"
    written.append(prediction[12])
    assert list(index.predict(written, 8).tokens) == prediction[13:21]


def test_nothing_follows_the_end_of_a_prediction() -> None:
    index = NgramIndex([1, 2, 3])
    assert list(index.predict(array("i", [7, 8]), 16).tokens) == [1, 2, 3]
    found = index.predict(array("i", [7, 8, 1, 2]), 16)
    assert list(found.tokens) == [3]
    assert len(found.probs) == 1
    assert not index.predict(array("i", [7, 8, 1, 2, 3]), 16).tokens


def others(*texts: Sequence[int]) -> SortedTexts:
    found = SortedTexts()
    for text in texts:
        found.add(np.array(text, np.int32))
    return found


def test_other_texts_are_repeated_where_the_text_itself_has_nothing_nearly_as_long() -> None:
    other = others([9, 9, 1, 2, 3, 4, 5, 6, 7, 8])

    def next_after(text: Sequence[int]) -> list[int]:
        return list(NgramIndex(others=[other]).predict(array("i", text), 2).tokens)

    assert next_after([40, 1]) == [2, 3]
    assert next_after([1, 50, 40, 1, 2]) == [3, 4]
    assert next_after([2, 50, 40, 1, 2]) == [50, 40], "one token of its own is worth three"
    assert next_after([3, 50, 40, 1, 2, 3]) == [50, 40]
    assert next_after([4, 50, 40, 1, 2, 3, 4]) == [5, 6]
    assert next_after([40, 6, 7]) == [8], "nothing follows the end"
    assert next_after([40, 8]) == []
    assert next_after([40]) == []


@pytest.mark.parametrize("n_kinds", [2, 12])
def test_the_longest_match_in_other_texts_is_found(n_kinds: int) -> None:
    """Compared with every place of each, over texts that come and go."""
    rng = np.random.default_rng(n_kinds)
    other, texts = SortedTexts(), list[list[int]]()
    for _ in range(60):
        texts.append(rng.integers(0, n_kinds, rng.integers(1, 40)).tolist())
        other.add(np.array(texts[-1], np.int32))
        if rng.random() < 0.1:
            n_most = int(rng.integers(0, 400))
            other.drop(n_most)
            while texts and sum(len(text) + 1 for text in texts) > n_most:
                texts.pop(0)
        assert len(other) == sum(len(text) + 1 for text in texts)
        end = [*rng.integers(0, n_kinds, rng.integers(1, 12)).tolist()]
        ngrams = Ngrams(constants.NGRAM_PRIORS, 6.0, others=[other])
        text = [*range(100, 140), *end]
        ngrams.update(np.array(text, np.int32))
        tokens, _, lengths, _, origin = ngrams.predict(1)
        found = {
            (n, each[place])
            for each in texts
            for place in range(1, len(each))
            if (n := n_same_before(each, place, text))
        }
        own = max((n_same_before(text, i, text) for i in range(1, len(text))), default=0)
        longest = max((n for n, _ in found), default=0)
        if longest > 3 * own:
            assert origin == Origin.OTHERS
            assert lengths == [longest]
            assert (longest, tokens[0]) in found
        else:
            assert origin == Origin.TEXT
            assert lengths == ([own] if own else [])


def n_same_before(other: Sequence[int], place: int, text: Sequence[int]) -> int:
    n = 0
    while n < min(place, LENGTH_MOST) and other[place - 1 - n] == text[-1 - n]:
        n += 1
    return n


def test_a_source_in_another_text_that_was_wrong_is_no_longer_sure() -> None:
    index = NgramIndex(others=[others([1, 2, 3, 4, 5])])
    text = array("i", [70, 1, 2, 3])
    before = index.predict(text, 2).probs
    index.observe(0, 1)
    assert index.predict(text, 2).probs[0] < 0.6 * before[0]


def test_a_million_tokens_are_looked_up_by_few_comparisons() -> None:
    rng = np.random.default_rng(0)
    many = (rng.zipf(1.3, 1_000_000) % 5000).astype(np.int32)
    other = SortedTexts()
    other.add(many)
    ngrams = Ngrams(constants.NGRAM_PRIORS, 6.0, others=[other])
    ngrams.update(many[500:540])
    before = ngrams.n_compared
    assert ngrams.predict(8)[0] == many[540:548].tolist()
    assert ngrams.n_compared - before < 120


def test_cells_of_images_are_not_drafted() -> None:
    text = [1, 2, 3, 4, -70, -71, 5, 1, 2]
    found = NgramIndex().predict(text, 8)
    assert list(found.tokens) == [3, 4]
    assert len(found.probs) == 2
    store = TextStore(1000)
    store.add_written([1, -70, -71, 2, 3, 4, 5, 6], 3)
    (written,) = store.texts(repeats=False)
    assert list(NgramIndex((), [written]).predict([9, 1], 2).tokens) == [2, 3]
