"""Our distributions are those of llama.cpp's sampler chain: same support and probabilities."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
import pytest

from ggufspec.demo import embedded_target
from ggufspec.llama.model import Model
from ggufspec.llama.vocab import Vocab
from ggufspec.sampling import Sampling, to_probs

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
]


class Chain:
    """llama.cpp's chain for a Sampling, with `dist` at its end, fed with a text."""

    def __init__(self, sampling: Sampling, vocab: Vocab, n_vocab: int, n_ctx: int) -> None:
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        self._n_vocab = n_vocab
        if sampling.logit_bias:
            biases = (llama_cpp.llama_logit_bias * len(sampling.logit_bias))(
                *(llama_cpp.llama_logit_bias(*pair) for pair in sampling.logit_bias.items())
            )
            self._add(llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        texts = [b"\n", b":", b'"', b"*"]
        breakers = (ctypes.c_char_p * len(texts))(*texts)

        def window(n: int) -> int:
            return n_ctx if n < 0 else n

        made = {
            "penalties": lambda: llama_cpp.llama_sampler_init_penalties(
                n_vocab,
                window(sampling.repeat_last_n),
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            ),
            "dry": lambda: llama_cpp.llama_sampler_init_dry(
                vocab._vocab,
                sampling.dry_multiplier,
                sampling.dry_base,
                sampling.dry_allowed_length,
                window(sampling.dry_penalty_last_n),
                breakers,
                len(texts),
            ),
            "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma),
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampling.top_k),
            "typical_p": lambda: llama_cpp.llama_sampler_init_typical(sampling.typical_p, 0),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(sampling.top_p, 0),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampling.min_p, 0),
            "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
                sampling.temperature, 0.0, 1.0
            ),
        }
        for name in sampling.samplers:
            self._add(made[name]())
        self._add(llama_cpp.llama_sampler_init_dist(1))

    def _add(self, sampler: Any) -> None:
        assert sampler
        llama_cpp.llama_sampler_chain_add(self._chain, sampler)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def probs(self, logits: np.ndarray) -> np.ndarray:
        """Of one row (n_vocab)."""
        data = (llama_cpp.llama_token_data * self._n_vocab)()
        rows = np.ctypeslib.as_array(data)
        rows["id"] = np.arange(self._n_vocab)
        rows["logit"] = logits
        candidates = llama_cpp.llama_token_data_array(data, self._n_vocab, -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(candidates))
        found = np.zeros(self._n_vocab)
        for candidate in candidates.data[: candidates.size]:
            found[candidate.id] = candidate.p
        return found

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self._chain)


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
    return row.astype(np.float32)


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    # Below 1e-36, our exponential is 0.
    np.testing.assert_array_equal(found > 1e-36, expected > 1e-36)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("options", CHAINS, ids=str)
def test_random_rows_have_llama_cpps_distribution(options: dict[str, Any], model: Model) -> None:
    rng = np.random.default_rng(7)
    sampling = Sampling(**options)
    ours = replace(sampling, dry_breakers=model.vocab.sequence_breakers(("\n", ":", '"', "*")))
    for n_vocab, n_rows in ((3, 20), (90, 30), (1500, 30), (4096, 30)):
        for _ in range(n_rows):
            tokens = [1, *text_of(rng, int(rng.integers(0, 100)), n_vocab)]
            row = random_row(rng, n_vocab)
            if sampling.logit_bias and n_vocab < 12:
                continue
            chain = Chain(sampling, model.vocab, n_vocab, n_ctx=4096)
            chain.accept(tokens)
            check(np.asarray(to_probs(row[None], ours, tokens))[0], chain.probs(row))
            chain.close()
