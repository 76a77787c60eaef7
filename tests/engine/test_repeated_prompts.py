"""A repeated prompt has the same logits: the row after it is kept with its cells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.stream import Stream
from ggufspec.standin.embedded import embedded_draft, embedded_target

PROMPTS = [
    " ".join(f"The {animal} came to the {n}th house and asked for bread." for n in range(3, 13))
    for animal in ("fox", "old horse", "wolf", "tailor's wife")
]


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Fewer slots than prompts: most are copied out of their slot, and back."""
    with ggufspec.load(
        embedded_target(), embedded_draft(), n_ctx=512, n_slots=request.param, cache_ram=64
    ) as made:
        yield made


def greedy(engine: Engine, prompt: str, **options: Any) -> tuple[list[float], float]:
    """Log-probabilities of 12 greedy tokens, and the seconds of the first round's pass."""
    given = CheckedOptions.of({"temperature": 0, "max_tokens": 12, **options})
    stream = Stream(engine.scheduler, engine.prepare(prompt, given, n_top=0))
    logprobs = [token.chosen.logprob for chunk in stream for token in chunk.logprobs or ()]
    return logprobs, stream.rounds[0].target_seconds


def test_each_text_is_repeated_bit_for_bit(engine: Engine) -> None:
    first = [greedy(engine, prompt, drafter="none")[0] for prompt in PROMPTS]
    for _ in range(2):
        assert [greedy(engine, prompt, drafter="none")[0] for prompt in PROMPTS] == first


def test_only_the_same_prompt_needs_no_pass_for_its_first_token(engine: Engine) -> None:
    for other in (PROMPTS[0], PROMPTS[0] + " He", PROMPTS[0][:-20]):
        greedy(engine, PROMPTS[0], drafter="none")
        before = engine.pair.decode_seconds
        _, seconds = greedy(engine, other, drafter="none", max_tokens=1)
        is_read = engine.pair.decode_seconds > before
        assert is_read == (seconds > 0) == (other != PROMPTS[0])


def test_a_draft_after_a_repeated_prompt_is_verified(engine: Engine) -> None:
    texts = [greedy(engine, PROMPTS[0], drafter="model", n_draft=3)[0] for _ in range(2)]
    assert texts[0] == pytest.approx(texts[1], abs=0.05)
