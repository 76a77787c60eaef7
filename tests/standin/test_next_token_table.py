"""The map is one cycle that any two files share; a draft has the asked share of it, soon."""

from __future__ import annotations

import numpy as np
import pytest

from ggufspec.standin.next_token_table import codes, is_right, successors, words_of

SHARES = (0.3, 0.9)


def test_the_map_is_one_cycle_through_all_words() -> None:
    n_vocab = 50257
    after, words = successors(n_vocab, 1.0), words_of(n_vocab)
    token, seen = words.start, set()
    while token not in seen:
        seen.add(token)
        token = int(after[token])
    assert seen == set(range(words.start, words.stop))


def test_it_leads_from_every_token_of_a_prompt_onto_the_cycle() -> None:
    after, words = successors(151936, 1.0), words_of(151936)
    assert words.start <= after.min() <= after.max() < words.stop
    assert len(set(after[: words.start].tolist())) > 250


@pytest.mark.parametrize(("smaller", "larger"), [(32000, 32016), (262144, 262208)])
def test_vocabularies_that_differ_in_padding_share_it(smaller: int, larger: int) -> None:
    agreement = 0.7
    stop = words_of(smaller).stop
    assert words_of(larger).stop == stop
    ours, theirs = successors(smaller, agreement), successors(larger, agreement)
    assert np.array_equal(ours[:stop], theirs[:stop])


def test_it_is_the_same_wherever_it_is_written() -> None:
    """So two files that were written by two versions of numpy agree."""
    assert successors(32000, 1.0)[[0, 300, 31743]].tolist() == [9087, 29712, 15012]
    assert successors(32000, 0.5)[[0, 300, 31743]].tolist() == [13686, 10050, 15012]
    assert codes(np.array([5, 31999]), 70).astype(int).sum(axis=1).tolist() == [4, -2]


@pytest.mark.parametrize("agreement", [0.0, *SHARES, 0.99, 1.0])
def test_the_share_of_the_whole_cycle_is_the_asked_one(agreement: float) -> None:
    n_vocab = 50257
    words = slice(words_of(n_vocab).start, words_of(n_vocab).stop)
    agrees = successors(n_vocab, agreement) == successors(n_vocab, 1.0)
    assert agrees[words].mean() == pytest.approx(agreement, abs=0.001)


@pytest.mark.parametrize("agreement", SHARES)
def test_runs_are_as_long_as_independent_tokens_would_make_them(agreement: float) -> None:
    ends = np.flatnonzero(~is_right(200_000, agreement))
    lengths = np.diff(ends) - 1
    for n in range(8):
        assert (lengths >= n).mean() == pytest.approx(agreement**n, abs=0.004)
    # and one run tells little of the next
    assert abs(np.corrcoef(lengths[:-1], lengths[1:])[0, 1]) < 0.2


@pytest.mark.parametrize("agreement", SHARES)
@pytest.mark.parametrize("n_draft", [1, 8])
def test_short_texts_show_the_share(agreement: float, n_draft: int) -> None:
    """Of 300 tokens; independent tokens would be off by three times as much."""
    steps = is_right(100_000, agreement)
    found = [share(steps[start : start + 300], n_draft) for start in range(0, 90_000, 450)]
    assert np.mean(found) == pytest.approx(agreement, abs=0.004)
    assert np.std(found) < 0.02


def share(steps: np.ndarray, n_draft: int) -> float:
    """Accepted of drafted tokens that were reached, where rounds of `n_draft` go along steps."""
    at = n_accepted = n_rejected = 0
    while at < len(steps):
        drafted = steps[at : at + n_draft]
        stood = int(np.argmin(drafted)) if not drafted.all() else len(drafted)
        n_accepted += stood
        n_rejected += stood < len(drafted)
        at += stood + 1
    return n_accepted / (n_accepted + n_rejected)


def test_codes_tell_tokens_apart() -> None:
    signs = codes(np.arange(2000), 320).astype(np.int32)
    products = signs @ signs.T
    assert (np.diag(products) == 320).all()
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() < 320 / 2
    assert (signs[:, 0] == 1).all()
