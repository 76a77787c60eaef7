"""Logits become the distribution that the options describe; coins land where they should."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from ggufspec.errors import DecodeError, OptionError
from ggufspec.sampling import Sampling, pick, to_probs

PLAIN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPTIONS = [
    {"temperature": 1.0, **PLAIN},
    {"temperature": 0.3, **PLAIN},
    {"temperature": 1.7, **PLAIN, "top_k": 5},
    {"temperature": 0.7, **PLAIN, "top_p": 0.6},
    {"temperature": 0.7, **PLAIN, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("n_vocab", [1, 7, 300])
def test_native_equals_numpy(options: dict[str, float], n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    logits = rng.normal(0, 3, (40, n_vocab)).astype(np.float32)
    probs = to_probs(logits, Sampling(**options))
    expected = np.array([reference.to_probs(row, **options) for row in logits])
    assert probs.dtype == np.float32
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, atol=2e-6)


def test_rows_sum_to_one_and_may_be_written_in_place() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (3, 1000)).astype(np.float32)
    out = np.empty_like(logits)
    assert to_probs(logits, Sampling(), out=out) is out
    np.testing.assert_allclose(out.sum(axis=1), 1, atol=1e-6)


def test_a_bias_moves_tokens_and_minus_infinity_bans_them() -> None:
    logits = np.array([[5.0, 1.0, 0.0, 4.0]], np.float32)
    greedy = Sampling(temperature=0, logit_bias=((0, -np.inf), (1, 9.0)))
    assert to_probs(logits, greedy)[0].tolist() == [0, 1, 0, 0]
    sampled = Sampling(temperature=1, **PLAIN, logit_bias=((0, -np.inf),))
    assert to_probs(logits, sampled)[0, 0] == 0


def test_broken_logits_are_never_drawn() -> None:
    sampling = Sampling(temperature=1, **PLAIN)
    row = np.array([[np.nan, 1.0, -np.inf]], np.float32)
    assert to_probs(row, sampling)[0].tolist() == [0, 1, 0]
    for hopeless in (np.nan, -np.inf, np.inf):
        with pytest.raises(DecodeError, match="cannot be sampled"):
            to_probs(np.full((2, 3), hopeless, np.float32), sampling)


def test_coins_land_by_probability() -> None:
    probs = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], np.float32)
    landed = [pick(probs[None], coin) for coin in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999999999)]
    assert landed == [1, 1, 3, 3, 4, 4]


def test_a_coin_never_lands_on_an_impossible_token() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        probs = (rng.random(50) * (rng.random(50) < 0.1)).astype(np.float32)
        probs[7] = 1e-8
        for coin in (0.0, rng.random(), np.nextafter(1.0, 0.0)):
            assert probs[pick(probs[None], coin)] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 10**20},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Sampling(**options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(DecodeError, match="shape"):
        to_probs(logits, Sampling(), out=np.zeros((2, 5), np.float32))
    with pytest.raises(DecodeError, match="outside the vocabulary"):
        to_probs(logits, Sampling(logit_bias=((4, 1.0),)))
