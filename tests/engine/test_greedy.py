"""Greedy texts are equal up to a token that rounding chose; other differences are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from greedy import assert_same

import ggufspec
from ggufspec.decoding.types import Logits
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.engine.scoring import compare
from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.standin.embedded import embedded_draft, embedded_target

PROMPTS = [
    *("The count is", "It was past midnight when", "Up betimes,", "The king rose and", "A fox"),
]
N_TOKENS = 60
SMALL, LARGE = 0.02, 0.1  # logits: as kernels round, and a fault
Spoil = Callable[[float], None]


def loaded(flash_attention: str) -> Engine:
    how: Any = {"n_ctx": 512, "n_threads": 1, "flash_attention": flash_attention}
    return ggufspec.load(embedded_target(), embedded_draft(), **how)


@pytest.fixture(scope="module")
def pair() -> Iterator[Engine]:
    """With llama.cpp's attention: batches may round in their own way."""
    with loaded("off") as engine:
        yield engine


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Moves the logits of passes with several rows by up to this much, each token by its own."""
    honest = Context.rows

    def by(error: float) -> None:
        def rows(context: Context, first: int, n_rows: int) -> Logits:
            found = np.array(honest(context, first, n_rows))
            if n_rows > 1:
                noise = np.random.default_rng(n_rows).uniform(-error, error, found.shape[1])
                found += noise.astype(np.float32)
            return found

        monkeypatch.setattr(Context, "rows", rows)

    return by


def written(pair: Engine, **options: Any) -> list[list[int]]:
    given: GenerateOptions = {"temperature": 0.0, "max_tokens": N_TOKENS, **options}
    return [list(pair.generate(prompt, **given).tokens) for prompt in PROMPTS]


def test_what_rounding_changed_passes_and_what_a_fault_changed_does_not(
    pair: Engine, spoil: Spoil
) -> None:
    options: Any = {"repeat_penalty": 1.15, "frequency_penalty": 0.2, "regex": "[^q]*"}
    plain = written(pair, drafter="none", **options)
    spoil(LARGE)
    faulty = written(pair, n_draft=3, **options)
    spoil(SMALL)
    rounded = written(pair, n_draft=3, **options)
    assert rounded != plain

    def check(texts: list[list[int]]) -> None:
        for each in zip(PROMPTS, texts, plain, strict=True):
            assert_same(pair, *each, **options)

    check(rounded)
    spoil(0.0)  # what is measured is this machine's rounding, not the fault
    with pytest.raises(AssertionError, match=r"logits apart .*: rounding is not the cause") as told:
        check(faulty)
    assert "found:  " in str(told.value)
    assert "wanted: " in str(told.value)


def test_a_difference_has_its_place_its_tokens_and_their_gaps(pair: Engine) -> None:
    prompt = pair.tokenize(PROMPTS[0])
    plain = written(pair, drafter="none")[0]
    rows = np.concatenate([*scoring.logits(pair, prompt, plain[:11], whose="target")])
    order = [int(token) for token in rows[10].argsort()[::-1]]
    for rank in (1, 50):
        found = compare(pair, prompt, plain, [*plain[:10], order[rank], 5], CheckedOptions())
        assert found is not None
        assert (found.position, found.tokens) == (10, (plain[10], order[rank]))
        gap = float(rows[10][order[0]] - rows[10][order[rank]])
        assert found.gaps == pytest.approx((gap, gap), abs=2 * found.rounding + 1e-4)
        assert not found.is_near_tie
    assert compare(pair, prompt, plain, plain, CheckedOptions()) is None
    (end,) = pair.vocab.stop_tokens
    for texts in ((plain[:10], plain), (plain, plain[:10])):
        found = compare(pair, prompt, *texts, CheckedOptions())
        assert found is not None
        assert end in found.tokens
        assert found.gap > 1, "it never ends by itself"


@pytest.mark.skipif(
    kernels.attention_refusal() is not None, reason="own attention cannot be used here"
)
def test_where_our_kernels_compute_everything_nothing_is_a_near_tie(spoil: Spoil) -> None:
    """Also if batches differ: that is a fault there, which a comparison must not measure."""
    with loaded("own") as exact:
        plain = written(exact, drafter="none")
        assert written(exact, n_draft=3) == plain
        spoil(SMALL)
        other = written(exact, n_draft=3)
        divergences = [
            compare(exact, exact.tokenize(prompt), *texts, CheckedOptions())
            for prompt, *texts in zip(PROMPTS, other, plain, strict=True)
        ]
    found = [each for each in divergences if each is not None]
    assert found
    assert all(each.gap < 2 * SMALL and not each.is_near_tie for each in found)


def test_a_token_that_was_not_allowed_is_no_near_tie(pair: Engine) -> None:
    prompt, options = pair.tokenize(PROMPTS[0]), CheckedOptions.of({"logit_bias": {77: -np.inf}})
    found = compare(pair, prompt, [5, 6], [77, 6], options)
    assert found is not None
    assert found.gap == np.inf
    assert not found.is_near_tie
