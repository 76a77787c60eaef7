"""Gemma's sliding window of 512 tokens: behind it, text is right whatever was dropped before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from real_models import Load, MakeLlama, greedy

from ggufspec.bench.audit.statistics import Distribution, to_distributions, total_variation
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine

LINES = [f"Day {i}: we sailed {i * 37 % 90} miles and saw {i * 7 % 11} birds.\n" for i in range(45)]
HOW = {"n_ctx": 1024, "n_batch": 1024, "flash_attention": "off"}  # a prompt is one batch
ROUNDING = 0.05  # total variation, in the median: batches of other sizes make up to this


@pytest.fixture
def engine(load: Load) -> Engine:
    return load("gemma", "gemma", **HOW)


@pytest.fixture
def prompt(engine: Engine) -> list[int]:
    tokens = engine.tokenize("".join(LINES) + "Day 45: we")
    assert 700 < len(tokens) < 980
    return tokens


def distributions(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> Distribution:
    rows = np.concatenate([*scoring.logits(engine, prompt, text, whose="target")])
    return to_distributions(
        rows, Sampling(temperature=1.0, samplers=("temperature",)), prompt, text[:-1]
    )


def assert_same(engine: Engine, prompt: Sequence[int], text: Sequence[int]) -> None:
    """The cache as it is gives the distributions of a cache that is filled anew."""
    found = distributions(engine, prompt, text)
    engine.forget()
    wanted = distributions(engine, prompt, text)
    distances = [total_variation(*pair) for pair in zip(found, wanted, strict=True)]
    assert np.median(distances) < ROUNDING, distances


def test_text_behind_the_window_is_that_of_llama_cpp(
    engine: Engine, prompt: list[int], llama: MakeLlama
) -> None:
    done = engine.generate(prompt, temperature=0, drafter="none", max_tokens=24)
    assert list(done.tokens) == greedy(llama(engine), prompt, 24)


def test_rejected_drafts_leave_no_trace(engine: Engine, prompt: list[int]) -> None:
    wrong: Any = {"draft_temperature": 4.0, "min_p": 0.0, "top_p": 1.0, "top_k": 0}
    done = engine.generate(prompt, temperature=0, n_draft=8, max_tokens=16, **wrong)
    assert done.stats.n_drafted - done.stats.n_accepted > 40
    text = engine.tokenize("Day 61: we sailed 7 miles and saw 9 birds.")[1:]
    assert_same(engine, [*prompt, *done.tokens[:-3]], text)


def test_prompts_share_a_beginning_longer_than_the_window(
    engine: Engine, prompt: list[int]
) -> None:
    engine.generate(prompt, max_tokens=24, n_draft=4, seed=1)
    other = [*prompt[:-200], *engine.tokenize("Then a storm came. We lost")[1:]]
    text = engine.tokenize(" the mast, and all the birds were gone.")[1:]
    done = engine.generate(other, temperature=0, max_tokens=1)
    assert done.stats.n_prompt_reused == len(prompt) - 200 > 512
    assert_same(engine, other, text)
