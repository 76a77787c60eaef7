"""A trained EAGLE-3 head of SmolLM2-135M-Instruct drafts what its target writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import PathOf

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions

HEAD = Path(__file__).parents[1] / "benchmarks" / "data" / "eagle3-smollm2-135m.gguf"
QUESTIONS = ["Write a short story about a river and a boat.", "How does a bicycle stay upright?"]


@pytest.fixture
def engine(path_of: PathOf) -> Engine:
    return ggufspec.load(path_of("smollm"), HEAD, n_ctx=512, tuned=False)


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.4), (1.0, 0.25)])
def test_a_trained_head_is_often_right(engine: Engine, temperature: float, least: float) -> None:
    """It reached 0.58 and 0.46 on prompts like those that it was trained on."""
    how: GenerateOptions = {"temperature": temperature, "n_draft": 1, "max_tokens": 100, "seed": 1}
    n_drafted = n_accepted = 0
    with engine:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            written = engine.chat(messages, drafter="model", **how)
            n_drafted += written.stats.n_drafted
            n_accepted += written.stats.n_accepted
    assert n_accepted > least * n_drafted > 0
