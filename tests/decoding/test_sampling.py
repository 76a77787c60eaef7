"""Logits become the distribution that the options describe; uniforms land where they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference

from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Rows, Sampling, as_rows, draw, to_probs
from ggufspec.errors import DecodeError, OptionError

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
@pytest.mark.parametrize("n_vocab", [1, 300])
def test_native_equals_numpy(options: dict[str, float], n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    logits = rng.normal(0, 3, (40, n_vocab)).astype(np.float32)
    probs = np.asarray(to_probs(logits, Sampling(**options), draft=[0] * (len(logits) - 1)))
    expected = np.array([reference.to_probs(row, **options) for row in logits])
    assert probs.dtype == np.float32
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, atol=2e-6)


def probs_of(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Of one row (n_vocab)."""
    return np.asarray(to_probs(logits[None].astype(np.float32), sampling))[0]


def test_rows_sum_to_one_and_a_store_of_them_is_used_again() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (3, 100_000)).astype(np.float32)
    out = Rows(3, 100_000)
    for options in OPTIONS:
        assert to_probs(logits, Sampling(**options), draft=[1, 2], out=out) is out
        np.testing.assert_allclose(np.asarray(out).sum(axis=1), 1, atol=1e-5)
        fresh = to_probs(logits, Sampling(**options), draft=[1, 2])
        np.testing.assert_array_equal(np.asarray(out), np.asarray(fresh))


def test_a_bias_moves_tokens_and_minus_infinity_bans_them() -> None:
    logits = np.array([5.0, 1.0, 0.0, 4.0], np.float32)
    greedy = Sampling(temperature=0, logit_bias={0: -np.inf, 1: 9.0})
    assert probs_of(logits, greedy).tolist() == [0, 1, 0, 0]
    sampled = Sampling(temperature=1, **PLAIN, logit_bias={0: -np.inf})
    assert probs_of(logits, sampled)[0] == 0


def test_broken_logits_are_never_drawn() -> None:
    sampling = Sampling(temperature=1, **PLAIN)
    assert probs_of(np.array([np.nan, 1.0, -np.inf]), sampling).tolist() == [0, 1, 0]
    for hopeless in (np.nan, -np.inf, np.inf):
        for options in OPTIONS:
            with pytest.raises(DecodeError, match="cannot be sampled"):
                probs_of(np.full(3, hopeless), Sampling(**options))


def test_rows_that_are_appended_outlive_their_logits() -> None:
    rng = np.random.default_rng(2)
    for options in OPTIONS:
        sampling = Sampling(**options)
        rows, expected = Rows(3, 50), []
        for _ in range(3):
            logits = rng.normal(0, 3, (1, 50)).astype(np.float32)
            expected.append(np.asarray(to_probs(logits, sampling))[0])
            draw(rows, logits, sampling, (), None, 0.0)
            logits.fill(np.nan)
        np.testing.assert_array_equal(np.asarray(rows), expected)


def test_penalties_see_the_drafted_tokens_before_each_position() -> None:
    logits = np.zeros((3, 5), np.float32)
    sampling = Sampling(temperature=1, **PLAIN, presence_penalty=30.0)
    probs = np.asarray(to_probs(logits, sampling, tokens=[1], draft=[3, 0]))
    assert [np.nonzero(row > 1e-6)[0].tolist() for row in probs] == [
        [0, 2, 3, 4],
        [0, 2, 4],
        [2, 4],
    ]


def test_uniforms_select_tokens_by_probability() -> None:
    rows = as_rows(np.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], np.float32))
    landed = [rows.pick(0, uniform) for uniform in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999999999)]
    assert landed == [1, 1, 3, 3, 4, 4]


def test_a_seed_repeats_its_streams_and_no_stream_repeats_another() -> None:
    """A draft by the uniforms that judge it would be accepted too often."""
    drawn, again = ([tuple(stream(4)) for stream in uniform_streams(7, 3)] for _ in range(2))
    assert drawn == again
    assert len({number for numbers in drawn for number in numbers}) == 12


def test_a_uniform_never_selects_an_impossible_token() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        probs = (rng.random(50) * (rng.random(50) < 0.1)).astype(np.float32)
        probs[7] = 1e-8
        rows = as_rows(probs[None])
        logits = np.where(probs > 0, 0.0, -np.inf).astype(np.float32)[None]
        dense = to_probs(logits, Sampling(temperature=1, **PLAIN))
        for uniform in (0.0, rng.random(), np.nextafter(1.0, 0.0)):
            assert probs[rows.pick(0, uniform)] > 0
            assert probs[dense.pick(0, uniform)] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_k": 10**20},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.1},
        {"typical_p": 0.0},
        {"top_n_sigma": float("nan")},
        {"repeat_last_n": -2},
        {"repeat_penalty": 0.0},
        {"dry_base": 0.5},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: float("inf")}},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Sampling(**options)


def test_samplers_that_there_are_not_are_refused_with_the_reason() -> None:
    with pytest.raises(OptionError, match="'infill' is not supported"):
        Sampling(samplers=("top_k", "infill"))
    for name in ("top_q", "mirostat"):  # an option of its own
        with pytest.raises(OptionError, match="choose from penalties, dry"):
            Sampling(samplers=(name,))


def test_samplers_may_be_spelled_as_llama_cpp_spells_them() -> None:
    spelled = ["typ_p", "top-k", "temp", "nucleus", "typ", "top-n-sigma", "min-p", "topp"]
    names = ("typical_p", "top_k", "temperature", "top_p", "typical_p", "top_n_sigma", "min_p")
    assert Sampling(samplers=spelled).samplers == (*names, "top_p")


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "top_k": 0}, 0.7),
        ({"temperature": 0}, 0),
        ({"temperature": 0, "samplers": ["temp", "top_k"]}, 0),
        ({"temperature": 0, "samplers": ["top_k", "top_p"]}, 0),
        ({"temperature": 0, "xtc_probability": 0.5, "dynatemp_range": 1}, 0),
        ({"temperature": 0, "samplers": ["adaptive_p"], "adaptive_target": 0.5}, 0),
        ({"temperature": 0, "mirostat": 2}, 0),
        ({"temperature": 0.7, "top_k": 1, "mirostat": 1, "mirostat_tau": 9}, 0.7),
        ({"temperature": 0.7, "samplers": []}, 1),
        ({"temperature": 0.7, "top_k": 1}, 0),
        ({"temperature": 0.7, "top_k": 1, "samplers": ["temp"]}, 0.7),
    ],
)
def test_a_token_is_drawn_where_more_than_one_is_left(
    options: dict[str, Any], temperature: float
) -> None:
    sampling = Sampling(**options)
    assert sampling.effective_temperature == temperature
    n_left = np.count_nonzero(probs_of(np.array([2.0, 1.9, 1.8, 0.0]), sampling))
    assert (n_left == 1) == (temperature == 0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits = np.zeros((2, 4), np.float32)
    with pytest.raises(DecodeError, match="shape"):
        to_probs(logits, Sampling(), draft=[1], out=Rows(2, 5))
    with pytest.raises(DecodeError, match="drafted"):
        to_probs(logits, Sampling())
    with pytest.raises(DecodeError, match="outside the vocabulary"):
        to_probs(logits, Sampling(logit_bias={4: 1.0}), draft=[1])


FORMS = {
    "dense": Sampling(temperature=0.7, top_k=0, top_p=1, min_p=0),
    "list": Sampling(temperature=0.7, top_k=9, top_p=1, min_p=0),
    "greedy": Sampling(temperature=0, top_k=9),
    "greedy, dense": Sampling(temperature=0, top_k=0, top_p=1, min_p=0),
}


def draw_kept(logits: np.ndarray, sampling: Sampling, n_most: int = 4) -> Rows:
    rows = Rows(n_most, logits.size)
    draw(rows, logits[None], sampling, (), None, 0.5)
    return rows


@pytest.mark.parametrize("n_vocab", [20, 3000])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_a_token_is_renormalised_and_outlives_the_first(
    form: str, n_vocab: int
) -> None:
    logits = np.random.default_rng(4).normal(0, 3, n_vocab).astype(np.float32)
    order = [int(token) for token in np.argsort(-logits)]
    rows = draw_kept(logits.copy(), FORMS[form])
    first = rows.pick(0, 0.0 if "greedy" not in form else 0.5)
    assert rows.append_without(0, first)
    assert rows.append_without(1, rows.pick(1, 0.9))
    expected = np.asarray(rows)[0].astype(float)
    if "greedy" in form:
        assert [rows.pick(i, 0.5) for i in range(3)] == order[:3]
        assert rows.gap(1) == logits[order[1]] - logits[order[2]]
    else:
        expected[first] = 0
        np.testing.assert_allclose(np.asarray(rows)[1], expected / expected.sum(), rtol=1e-5)
        left = [token for token in order if token != first]
        assert rows.gap(1) == logits[left[0]] - logits[left[1]]
    before = np.asarray(rows)
    copies = Rows(3, n_vocab)
    for i in range(3):
        copies.append_from(rows, i)
    rows.keep(0)
    for _ in range(3):
        draw(rows, logits[None, ::-1].copy(), FORMS[form], (), None, 0.5)
    del rows
    np.testing.assert_array_equal(np.asarray(copies), before)
    with pytest.raises(ValueError, match="no room"):
        copies.append_without(0, first)


@pytest.mark.parametrize("sampling", FORMS.values())
def test_a_row_without_its_last_token_is_none(sampling: Sampling) -> None:
    logits = np.full(20, -np.inf, np.float32)
    logits[[3, 5]] = 1, 0
    rows = draw_kept(logits, sampling)
    assert rows.append_without(0, 3)
    assert (rows.of(1, 5), rows.gap(1)) == (1, np.inf)
    assert not rows.append_without(1, 5)
    rows.append_certain(7)
    assert not rows.append_without(2, 7)
    assert len(rows) == 3
