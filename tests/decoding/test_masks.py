"""With a mask, samplers see the allowed tokens alone; what is forbidden is never drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from decoding.test_sampling import OPTIONS, PLAIN

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Rows, Sampling, draw, to_probs
from ggufspec.decoding.types import Draft, Masks
from ggufspec.errors import DecodeError

N_VOCAB = 5000
# Further samplers; the rows of the first ones are masked in place where many tokens are allowed.
OTHER_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, **PLAIN},
    {"temperature": 0.9, **PLAIN, "top_k": 128},
    {"temperature": 0.9, **PLAIN, "top_k": 129},
    {"temperature": 0.8, **PLAIN, "typical_p": 0.6},
    {"temperature": 0.8, **PLAIN, "top_n_sigma": 1.5},
    {"temperature": 0.8, **PLAIN, "repeat_penalty": 1.5, "repeat_last_n": 3},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 2.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, **PLAIN, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"temperature": 0.5, **PLAIN, "samplers": ("temperature", "min_p"), "min_p": 0.02},
    {"temperature": 0.7, "samplers": ("min_p", "top_k", "temperature"), "min_p": 0.02, "top_k": 9},
    {"temperature": 0.7, "samplers": ("top_k", "typical_p", "temperature"), "typical_p": 0.8},
]


class Fixed:
    """A constraint with given masks, one for each row."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Masks:
        return self._masks

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return len(draft)

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        return ()

    def n_free(self, tokens: Sequence[int]) -> int:
        return 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        return False


def packed(allowed: np.ndarray, n_words: int | None = None) -> Masks:
    """Masks of booleans (n, n_vocab)."""
    n_words = -(-allowed.shape[1] // 32) if n_words is None else n_words
    bits = np.zeros((len(allowed), 32 * n_words), bool)
    n = min(allowed.shape[1], 32 * n_words)
    bits[:, :n] = allowed[:, :n]
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def masked(options: dict[str, Any], allowed: np.ndarray) -> Sampling:
    return Sampling(**options, constraint=Fixed(packed(allowed)))


def some(rng: np.random.Generator, n_rows: int, n_allowed: int, n_vocab: int) -> np.ndarray:
    allowed = np.zeros((n_rows, n_vocab), bool)
    for row in allowed:
        row[rng.choice(n_vocab, n_allowed, replace=False)] = True
    return allowed


@pytest.mark.parametrize("n_allowed", [1, 60, 1024, 1025])
@pytest.mark.parametrize("options", [*OPTIONS, *OTHER_OPTIONS], ids=str)
def test_samplers_see_the_allowed_tokens_alone(options: dict[str, Any], n_allowed: int) -> None:
    """The same as a vocabulary of these tokens, in rows that are read in place and in copies."""
    rng = np.random.default_rng(n_allowed)
    sampling = Sampling(**options)
    for _ in range(2):
        logits = rng.normal(0, 3, (1, N_VOCAB)).astype(np.float32)
        allowed = some(rng, 1, n_allowed, N_VOCAB)
        kept = np.flatnonzero(allowed[0])
        text = [int(x) for x in rng.choice(kept, 8)] + [
            int(x) for x in rng.integers(N_VOCAB, size=3)
        ]
        text += text[4:8]
        inside = {int(token): i for i, token in enumerate(kept)}
        small_text = [inside.get(token, N_VOCAB + token) for token in text]
        small = np.asarray(to_probs(np.ascontiguousarray(logits[:, kept]), sampling, small_text))
        expected = np.zeros(N_VOCAB)
        expected[kept] = small[0]
        constrained = masked(options, allowed)
        found = to_probs(logits, constrained, text)
        copied = Rows(1, N_VOCAB)
        draw(copied, logits, constrained, text, None, 0.0)
        drawn = Rows(1, N_VOCAB)
        uniform = rng.random()
        token = draw(drawn, logits, constrained, text, None, uniform)
        for rows in (found, copied, drawn):
            np.testing.assert_allclose(np.asarray(rows)[0], expected, atol=2e-6)
            assert rows.of(0, int(expected.argmax())) == pytest.approx(expected.max(), abs=2e-6)
            cumulative = expected.cumsum()
            chosen = rows.pick(0, uniform)
            assert cumulative[chosen] > uniform - 1e-5
            assert chosen == 0 or cumulative[chosen - 1] <= uniform + 1e-5
        assert token == drawn.pick(0, uniform)


@pytest.mark.parametrize("n_allowed", [60, 1500])
@pytest.mark.parametrize("options", [*OPTIONS, *OTHER_OPTIONS], ids=str)
def test_a_forbidden_token_is_never_drawn(options: dict[str, Any], n_allowed: int) -> None:
    """Even if its logit, or its bias, is the largest."""
    rng = np.random.default_rng(1)
    allowed = some(rng, 1, n_allowed, N_VOCAB)
    logits = rng.normal(0, 3, (1, N_VOCAB)).astype(np.float32)
    logits[~allowed] += rng.choice([0.0, 30.0, np.inf, np.nan], np.sum(~allowed))
    biased = int(np.flatnonzero(~allowed[0])[5])
    rows = to_probs(logits, replace(masked(options, allowed), logit_bias={biased: 50.0}))
    assert not np.asarray(rows)[~allowed].any()
    assert np.asarray(rows).sum() == pytest.approx(1, abs=1e-5)
    for uniform in (0.0, *rng.random(50), np.nextafter(1.0, 0.0)):
        assert allowed[0, rows.pick(0, uniform)]


@pytest.mark.parametrize("n_allowed", [40, 1500])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bias_counts_before_the_samplers(options: dict[str, Any], n_allowed: int) -> None:
    rng = np.random.default_rng(n_allowed)
    logits = rng.normal(0, 3, (1, N_VOCAB)).astype(np.float32)
    allowed = some(rng, 1, n_allowed, N_VOCAB)
    kept = np.flatnonzero(allowed[0])
    bias = tuple((int(token), float(rng.choice([-np.inf, 4.0, -2.0]))) for token in kept[::3])
    sampling = replace(masked(options, allowed), logit_bias=dict(bias))
    row = np.where(allowed, logits, -np.inf)[0]
    expected = reference.to_probs(row, **options, bias=bias)
    np.testing.assert_allclose(np.asarray(to_probs(logits, sampling))[0], expected, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_allowed", [3, 1500])
def test_of_equal_logits_an_allowed_one_is_drawn(n_allowed: int, temperature: float) -> None:
    rng = np.random.default_rng(n_allowed)
    allowed = some(rng, 1, n_allowed, N_VOCAB)
    logits = np.zeros((1, N_VOCAB), np.float32)
    for options in (PLAIN, {"top_k": 40}, {"top_p": 0.5}, {**PLAIN, "min_p": 0.5}):
        options = {"temperature": temperature, **options}
        (probs,) = np.asarray(to_probs(logits, masked(options, allowed)))
        found = np.flatnonzero(probs)
        assert allowed[0, found].all()
        np.testing.assert_allclose(probs[found], 1 / len(found), rtol=1e-5)
        if temperature == 0:
            assert len(found) == 1


@pytest.mark.parametrize("options", [*OPTIONS, *OTHER_OPTIONS], ids=str)
def test_a_single_allowed_token_is_certain(options: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (1, 40)).astype(np.float32)
    logits[0, 7] = -1e30  # whatever its logit, and the text before it
    rows = to_probs(logits, masked(options, np.eye(40, dtype=bool)[[7]]), [7, 7, 7])
    assert np.asarray(rows).tolist() == [np.eye(40)[7].tolist()]
    assert [rows.pick(0, uniform) for uniform in (0.0, 0.5, 0.999)] == [7, 7, 7]


@pytest.mark.parametrize("n_vocab", [1, 32, 70])
def test_masks_may_be_narrower_and_wider_than_the_vocabulary(n_vocab: int) -> None:
    """Models of one family pad their vocabularies to different sizes."""
    rng = np.random.default_rng(n_vocab)
    logits = rng.normal(0, 1, (1, n_vocab)).astype(np.float32)
    plain = np.asarray(to_probs(logits, Sampling(temperature=1, **PLAIN)))
    n_words = -(-n_vocab // 32)
    for n in (n_words, n_words + 1, n_words + 9):
        everything = Fixed(np.full((1, n), 2**32 - 1, np.uint32))
        found = to_probs(logits, Sampling(temperature=1, **PLAIN, constraint=everything))
        np.testing.assert_allclose(np.asarray(found), plain, atol=1e-6)
    for n in range(1, n_words):
        first = Fixed(np.full((1, n), 2**32 - 1, np.uint32))
        found = to_probs(logits, Sampling(temperature=1, **PLAIN, constraint=first))
        assert np.flatnonzero(np.asarray(found)).tolist() == list(range(32 * n))
    beyond = np.zeros((1, n_words + 2), np.uint32)
    beyond[0, -1] = 1
    with pytest.raises(DecodeError, match="cannot continue"):
        to_probs(logits, Sampling(constraint=Fixed(beyond)))


@pytest.mark.parametrize("options", [*OPTIONS, *OTHER_OPTIONS], ids=str)
def test_a_row_that_allows_nothing_is_an_error_only_if_a_text_gets_there(
    options: dict[str, Any],
) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (3, 40)).astype(np.float32)
    allowed = np.ones((3, 40), bool)
    allowed[1:] = False
    rows = to_probs(logits, masked(options, allowed), [1], [2, 3])
    assert np.asarray(rows).sum(axis=1) == pytest.approx([1, 0, 0])
    assert [rows.pick(i, 0.5) for i in (1, 2)] == [-1, -1]
    for hopeless in (
        masked(options, allowed[1:2]),
        replace(masked(options, np.eye(40, dtype=bool)[[7]]), logit_bias={7: -np.inf}),
        masked(options, np.eye(40, dtype=bool)[[7]]),
    ):
        row = np.where(np.arange(40) == 7, -np.inf, logits[:1]).astype(np.float32)
        with pytest.raises(DecodeError, match="the grammar or schema is too complex, or requires"):
            to_probs(row, hopeless)
        appended = Rows(2, 40)
        with pytest.raises(DecodeError, match="the grammar or schema is too complex, or requires"):
            draw(appended, row, hopeless, (), None, 0.5)
        assert len(appended) == 0


@pytest.mark.parametrize("name", verify.names())
def test_a_forbidden_drafted_token_and_all_behind_it_are_rejected(name: str) -> None:
    rng = np.random.default_rng(4)
    allowed = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)
    for _ in range(200):
        logits = rng.normal(0, 1, (4, 4)).astype(np.float32)
        target = to_probs(logits, masked({"temperature": 1.0, **PLAIN}, allowed), draft=[0, 3, 1])
        rows = rng.dirichlet(np.ones(4), 3).astype(np.float32)
        for probs in (None, rows):
            verdict = verify.rule(name)(Draft([0, 3, 1], probs), target, rng.random(4).tolist())
            assert verdict.n_accepted <= 1
            assert allowed[verdict.n_accepted, verdict.next_token]


def test_masks_of_another_number_of_rows_are_refused() -> None:
    logits = np.zeros((2, 40), np.float32)
    with pytest.raises(DecodeError, match="one mask for each row"):
        to_probs(logits, masked({}, np.ones((1, 40), bool)), draft=[1])


def test_certain_rows_stand_beside_drawn_ones() -> None:
    rows = Rows(4, 6)
    logits = np.random.default_rng(0).normal(0, 1, (1, 6)).astype(np.float32)
    rows.append_certain(3)
    draw(rows, logits, Sampling(temperature=1, **PLAIN), (), None, 0.0)
    rows.append_certain(5)
    token = draw(rows, logits, Sampling(temperature=0), (), None, 0.5)
    assert token == logits.argmax()
    probs = np.asarray(rows)
    assert probs[[0, 2, 3]].argmax(axis=1).tolist() == [3, 5, token]
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    rows.keep(3)
    rows.append_certain(0)
    assert np.asarray(rows)[3].tolist() == [1, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="no room"):
        rows.append_certain(0)
    rows.keep(0)
    for token in (-1, 6):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            rows.append_certain(token)


@pytest.mark.parametrize("options", [*OPTIONS, *OTHER_OPTIONS], ids=str)
def test_a_token_without_a_logit_is_as_a_forbidden_one(options: dict[str, Any]) -> None:
    """As in the rows of a draft that does not have all tokens of its target."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, N_VOCAB, 40).tolist() * 2
    for n_allowed in (1, 40, 1500):
        logits = rng.normal(0, 3, (1, N_VOCAB)).astype(np.float32)
        allowed = some(rng, 1, n_allowed, N_VOCAB)
        expected = np.asarray(to_probs(logits, masked(options, allowed), tokens))
        rows = np.where(allowed, logits, np.float32(-np.inf))
        found = np.asarray(to_probs(rows, Sampling(**options), tokens))
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=2e-6)
