"""Our distributions are those of llama.cpp's sampler chain: same support and probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.llama.model import Model
from ggufspec.standin.embedded import embedded_target
from tests.benchmarks.llama_chain import SamplerChain

BREAKERS = defaults.DRY_SEQUENCE_BREAKERS
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
CHAINS: list[dict[str, Any]] = [
    {},
    {**OFF},
    {**OFF, "temperature": 0.3},
    {**OFF, "temperature": 0.0},
    {"temperature": 0.0},
    {**OFF, "top_k": 40, "top_p": 0.95, "temperature": 0.7},
    {**OFF, "top_k": 1},
    {**OFF, "top_k": 500, "temperature": 1.3},
    {**OFF, "min_p": 0.05},
    {**OFF, "min_p": 1.0},
    {**OFF, "top_p": 0.9},
    {**OFF, "top_p": 0.999, "min_p": 0.01, "temperature": 0.6},
    {**OFF, "typical_p": 0.5},
    {**OFF, "typical_p": 0.9, "top_k": 60, "top_p": 0.8},
    {**OFF, "top_n_sigma": 1.0},
    {**OFF, "top_n_sigma": 2.5, "top_k": 30, "temperature": 1.5},
    {**OFF, "repeat_penalty": 1.3},
    {"repeat_penalty": 0.8, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {**OFF, "frequency_penalty": 0.2, "repeat_last_n": 5, "temperature": 0.9},
    {"presence_penalty": 1.0, "repeat_last_n": -1},
    {**OFF, "dry_multiplier": 0.8},
    {"dry_multiplier": 2.0, "dry_base": 1.2, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
    {"dry_multiplier": 1.0, "dry_base": 3.0, "dry_allowed_length": 0, "repeat_penalty": 1.1},
    {"logit_bias": {3: 2.5, 7: -np.inf, 11: -1.0}, "temperature": 1.0},
    {"samplers": ("temperature", "top_k", "top_p"), "temperature": 1.5},
    {"samplers": ("min_p", "top_k", "penalties", "temperature"), "repeat_penalty": 1.5},
    {"samplers": ("top_p", "dry", "min_p"), "dry_multiplier": 1.5},
    {"samplers": ("top_k", "temperature", "min_p", "temperature"), "temperature": 0.5},
    {"samplers": ()},
    {**OFF, "temperature": 0.9, "dynatemp_range": 0.6},
    {"temperature": 1.2, "dynatemp_range": 2.0, "dynatemp_exponent": 0.4},
    {"samplers": ("temperature", "top_k", "min_p"), "dynatemp_range": 0.5, "min_p": 0.2},
]
# XTC, alone and between others; above 0.5 it is off.
MIXTURES: list[dict[str, Any]] = [
    {"xtc_threshold": 0.1},
    {"xtc_threshold": 0.02, "temperature": 1.4},
    {"xtc_threshold": 0.51},
    {**OFF, "xtc_threshold": 0.05},
    {**OFF, "xtc_threshold": 0.0, "top_k": 12},
    {**OFF, "xtc_threshold": 0.05, "min_p": 0.02, "dynatemp_range": 0.7, "dry_multiplier": 1.0},
    {"samplers": ("xtc", "min_p", "temperature"), "xtc_threshold": 0.03, "min_p": 0.3},
    {"samplers": ("temperature", "xtc", "top_p"), "xtc_threshold": 0.1, "top_p": 0.7},
]
STATEFUL: list[dict[str, Any]] = [
    *(
        {"mirostat": version, **more}
        for version in (1, 2)
        for more in (
            {"temperature": 1.0},
            {"mirostat_tau": 2.0, "mirostat_eta": 0.5, "temperature": 0.7},
            {"mirostat_tau": 0.0, "mirostat_eta": 1.0, "temperature": 1.5, "dynatemp_range": 0.5},
        )
    ),
    *(
        {"samplers": samplers, "adaptive_target": target, **more}
        for samplers, target, more in (
            (("min_p", "adaptive_p"), 0.3, {}),
            (("adaptive_p", "top_k", "temperature"), 0.7, {"adaptive_decay": 0.5}),
            (("adaptive_p",), 0.0, {"adaptive_decay": 0.0}),
            (("min_p", "adaptive_p"), -1.0, {}),
        )
    ),
]


@pytest.fixture(scope="module")
def model() -> Any:
    found = Model(embedded_target())
    yield found
    found.close()


def text_of(rng: np.random.Generator, n: int, n_vocab: int) -> list[int]:
    """Tokens of few kinds, with repetitions."""
    some = rng.integers(0, n_vocab, 12)
    text = rng.choice(some, n).tolist()
    return [*text, *text[-7:-2], *text[-7:-4]] if n > 10 else text


def random_row(rng: np.random.Generator, n_vocab: int) -> np.ndarray:
    row = rng.normal(0, rng.choice([0.5, 2.0, 6.0]), n_vocab).astype(np.float32)
    kind = rng.integers(5)
    if kind == 0:
        row = np.round(row * 2) / 2  # ties everywhere
    if kind == 1:
        row[rng.random(n_vocab) < 0.3] = -np.inf
    if kind == 2:
        row[rng.integers(0, n_vocab, 3)] = row.max() + 5  # ties at the top
    if kind == 3:
        row = np.round(row)
        row[rng.integers(0, n_vocab, 2)] += row.max() + 4  # ties where top-k cuts, below others
    return row.astype(np.float32)


def check(found: np.ndarray, expected: np.ndarray, atol: float = 1e-5) -> None:
    assert found.shape == expected.shape
    # Below 1e-36, our exponential is 0.
    np.testing.assert_array_equal(found > 1e-36, expected > 1e-36)
    np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("options", CHAINS, ids=str)
def test_random_rows_have_llama_cpps_distribution(options: dict[str, Any], model: Model) -> None:
    rng = np.random.default_rng(7)
    sampling = Sampling(**options)
    ours = replace(sampling, dry_breakers=model.vocab.sequence_breakers(BREAKERS))
    for n_vocab, n_rows in ((3, 20), (90, 30), (1500, 30), (4096, 30)):
        for _ in range(n_rows):
            tokens = [1, *text_of(rng, int(rng.integers(0, 100)), n_vocab)]
            row = random_row(rng, n_vocab)
            if sampling.logit_bias and n_vocab < 12:
                continue
            if sampling.typical_p < 1 and np.isinf(row).any():
                continue  # llama.cpp's entropy is NaN, and what it keeps arbitrary
            if sampling.dynatemp_range > 0 and np.isinf(row).any():
                continue  # llama.cpp counts banned tokens as possible ones
            chain = SamplerChain(sampling, n_vocab, n_ctx=4096, vocab=model.vocab)
            chain.accept(tokens)
            check(np.asarray(to_probs(row[None], ours, tokens))[0], chain.probs(row))
            chain.close()


@pytest.mark.parametrize("options", MIXTURES, ids=str)
def test_xtc_mixes_the_distributions_with_and_without_it(
    options: dict[str, Any], model: Model
) -> None:
    """llama.cpp's sampler gives both: with probability 0, and 1."""
    rng, n_mixed = np.random.default_rng(3), 0
    breakers = model.vocab.sequence_breakers(BREAKERS)
    for n_vocab, n_rows in ((3, 30), (90, 30), (1500, 20), (4096, 20)):
        for _ in range(n_rows):
            row = random_row(rng, n_vocab)
            if (options.get("dynatemp_range") or not options["xtc_threshold"]) and np.isinf(
                row
            ).any():
                continue  # llama.cpp counts banned tokens as possible ones
            tokens = [1, *text_of(rng, int(rng.integers(0, 100)), n_vocab)]
            both = []
            for probability in (0.0, 1.0):
                sampling = Sampling(**options, xtc_probability=probability)
                chain = SamplerChain(sampling, n_vocab, n_ctx=4096, vocab=model.vocab)
                chain.accept(tokens)
                both.append(chain.probs(row))
                chain.close()
                own = replace(sampling, dry_breakers=breakers)
                check(np.asarray(to_probs(row[None], own, tokens))[0], both[-1])
            n_mixed += not np.array_equal(*both)
            own = replace(own, xtc_probability=0.3)
            check(np.asarray(to_probs(row[None], own, tokens))[0], 0.7 * both[0] + 0.3 * both[1])
            greedy = np.asarray(to_probs(row[None], replace(own, temperature=0), tokens))[0]
            assert greedy.max() == 1
    assert (n_mixed > 0) == (options["xtc_threshold"] <= 0.5)


def test_xtc_is_the_law_of_llama_cpps_draws() -> None:
    row = np.array([2.0, 1.8, 1.5, 1.0, 0.3, -1.0], np.float32)
    sampling = Sampling(xtc_probability=0.4, xtc_threshold=0.12)
    chain = SamplerChain(sampling, len(row), n_ctx=64)
    n_draws = 100_000
    counts = np.zeros(len(row))
    for _ in range(n_draws):
        chain.apply(row)
        counts[chain.drawn] += 1
    chain.close()
    expected = np.asarray(to_probs(row[None], sampling))[0]
    deviations = np.sqrt(n_draws * expected * (1 - expected))
    assert np.abs(counts - n_draws * expected).max() < 4.5 * deviations.max()


@pytest.mark.parametrize("options", STATEFUL, ids=str)
def test_states_follow_the_tokens_as_llama_cpps_do(options: dict[str, Any]) -> None:
    """Along a chain of tokens that llama.cpp draws, in one call, and call by call."""
    rng = np.random.default_rng(11)
    for n_vocab in (30, 90, 4096):  # with few, llama.cpp mirostat counts more than an int holds
        for spread in (1.0, 4.0):
            sampling = Sampling(**options)
            chain = SamplerChain(sampling, n_vocab, n_ctx=64)
            rows = rng.normal(0, spread, (30, n_vocab)).astype(np.float32)
            expected, drawn = [], list[int]()
            for row in rows:
                expected.append(chain.probs(row))
                drawn.append(chain.drawn)
                chain.accept([chain.drawn])
            chain.close()
            at_once = to_probs(rows, sampling, (), drawn[:-1])
            begun = sampling.begun()
            for i, token in enumerate(drawn):
                single = to_probs(rows[i : i + 1], begun, drawn[:i])
                single.advance(begun.native, (), token)
                check(np.asarray(single)[0], expected[i], 2e-5)
                check(np.asarray(at_once)[i], expected[i], 2e-5)


def test_adaptive_p_after_xtc_writes_texts_as_llama_cpps_does() -> None:
    """Its state follows hidden draws of XTC: pairs of tokens of long texts are counted."""
    rng = np.random.default_rng(5)
    row = np.array([2.0, 1.7, 1.4, 0.6], np.float32)
    options: dict[str, Any] = {"xtc_probability": 0.5, "samplers": ("xtc", "adaptive_p")}
    sampling = Sampling(**options, adaptive_target=0.4, adaptive_decay=0.5).begun(1)
    chain = SamplerChain(sampling, len(row), n_ctx=64)
    theirs, ours = list[int](), list[int]()
    for _ in range(60_000):
        chain.apply(row)
        theirs.append(chain.drawn)
        chain.accept([chain.drawn])
        rows = to_probs(row[None], sampling)
        ours.append(rows.pick(0, rng.random()))
        rows.advance(sampling.native, (), ours[-1])
    chain.close()
    counts = []
    for text in (theirs, ours):  # tokens between two pairs make them independent
        pairs = np.array(text[0::4]) * len(row) + np.array(text[1::4])
        counts.append(np.bincount(pairs, minlength=len(row) ** 2))
    first, second = counts
    n_distinct = np.count_nonzero(first + second)
    chi_square = ((first - second) ** 2 / np.maximum(first + second, 1)).sum()
    assert chi_square < n_distinct - 1 + 3 * (2 * (n_distinct - 1)) ** 0.5


def test_sequence_breakers_are_those_of_llama_cpp(model: Model) -> None:
    """Seen from outside: what DRY takes off the logits, around texts that break sequences."""
    options: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    sampling = Sampling(**options, dry_multiplier=1.0, dry_allowed_length=1)
    ours = replace(sampling, dry_breakers=model.vocab.sequence_breakers(BREAKERS))
    n_vocab = model.vocab.n_tokens
    for text in ('he said: "no". he said: "no', "a*b a*b a", "one\ntwo one\ntwo one\n", "::::"):
        tokens = model.vocab.tokenize(text, add_special=True, parse_special=True)
        chain = SamplerChain(sampling, n_vocab, n_ctx=512, vocab=model.vocab)
        row = np.zeros(n_vocab, np.float32)
        for n, token in enumerate(tokens, 1):
            chain.accept([token])
            check(np.asarray(to_probs(row[None], ours, tokens[:n]))[0], chain.probs(row))
        chain.close()
