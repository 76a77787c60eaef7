"""Exact passes: each token is computed in a pass of one size, with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.decoding.loop import timed
from ggufspec.decoding.types import Logits
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.logprobs import TokenLogprobs, entry_of
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.quantize import requantize
from ggufspec.standin import embedded

# Half of them are longer than a piece of a prompt, and two begin with the same 80 tokens.
SYSTEM = "The rain had not stopped for a week, and nobody in the village spoke of it. " * 5
PROMPTS = ["It was the best of", "Once upon a time", f"{SYSTEM}The old man", f"{SYSTEM}A child"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {"n_draft": 1},
    {"n_draft": 2},
    {"n_draft": 3},
    {"n_draft": "auto"},
    {"drafter": "ngram", "n_draft": 3},
    {"drafter": "staged", "n_draft": 3},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in F16: passes over one and over four tokens round differently."""
    path = tmp_path_factory.mktemp("exact") / "target.gguf"
    requantize(embedded.embedded_target(), path, "F16")
    return path


def loaded(target: Path, *, n_ctx: int = 256, **how: Any) -> Engine:
    how = {"n_threads": 1, "tuned": False, "exact": True, **how}
    return ggufspec.load(target, embedded.embedded_draft(), n_ctx=n_ctx, **how)


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Engine]:
    with loaded(target, n_slots=4) as made:
        yield made


def test_greedy_text_with_drafts_is_the_plain_text_to_the_last_bit(
    engine: Engine, exact_rows: dict[tuple[int, ...], bytes]
) -> None:
    for prompt in PROMPTS:
        plain = engine.generate(prompt, **GREEDY, drafter="none")
        n_plain = len(exact_rows)
        for way in WAYS:
            found = engine.generate(prompt, **GREEDY, **way)
            assert found.tokens == plain.tokens, way
        assert len(exact_rows) > n_plain, "drafts were scored, too"


def test_texts_at_the_same_time_are_those_of_an_idle_engine(engine: Engine) -> None:
    engine.forget()
    alone = [engine.generate(prompt, **GREEDY, drafter="none").tokens for prompt in PROMPTS]
    found = engine.generate_batch([*PROMPTS, *PROMPTS], **GREEDY, n_draft=3)
    assert [text.tokens for text in found] == [*alone, *alone]


def test_a_prompt_is_computed_in_the_same_pieces_after_any_other(
    engine: Engine, exact_rows: dict[tuple[int, ...], bytes]
) -> None:
    def first_rows(prompt: str) -> int:
        return engine.generate(prompt, **{**GREEDY, "max_tokens": 1}).stats.n_prompt_reused

    long = PROMPTS[2]
    for prompt in (long, PROMPTS[3], long, long[:200], long):
        first_rows(prompt)
    n = len(engine.tokenize(long)) - 1
    assert first_rows(long) == n, "the same prompt is not processed again"
    assert 0 < first_rows(f"{long} said to her") < n, "whole pieces are reused"


def test_a_seed_gives_the_same_text_with_drafts_under_the_rule_match(engine: Engine) -> None:
    options = {**GREEDY, "temperature": 0.9, "seed": 3, "verify": "match"}
    plain = engine.generate(PROMPTS[0], **options, drafter="none")
    for way in WAYS:
        assert engine.generate(PROMPTS[0], **{**options, **way}).tokens == plain.tokens, way


def test_without_padding_the_check_fails(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    real, real_rows, n = Context.decode, Context.rows, 0

    def unpadded(self: Context, tokens: Sequence[int], n_rows: int, *more: Any) -> None:
        nonlocal n
        n = len(tokens)
        while n > 1 and tokens[n - 2] == tokens[-1]:
            n -= 1
        real(self, tokens[:n], min(n_rows, n), *more)

    def rounded(self: Context, first: int, n_rows: int) -> Logits:
        """As kernels of most processors round: by the size of the pass."""
        return np.array(real_rows(self, first, n_rows)) * np.float32(1 + 1e-5 * n)

    monkeypatch.setattr(Context, "decode", unpadded)
    monkeypatch.setattr(Context, "rows", rounded)
    with pytest.raises(OptionError, match="depend on the tokens beside it"):
        loaded(target).close()


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    path = tiny.write_mamba(tmp_path / "model.gguf")
    with pytest.raises(OptionError, match="recurrent"):
        ggufspec.load(path, n_ctx=64, exact=True, tuned=False)


def test_a_prompt_is_scored_in_exact_passes_too(engine: Engine) -> None:
    tokens = engine.tokenize(PROMPTS[2])
    engine.forget()
    options = CheckedOptions.of(GREEDY)
    first = TokenLogprobs(entry_of(tokens[0], None, engine.vocab), ())
    text = engine.prepare(tokens, options, n_top=0, prompt_logprobs=[first])
    generation = Generation(engine.pair, text)
    scored: list[Logits] = []
    while generation.is_scoring:
        if (ask := generation.ask()) is not None:
            answer = timed(generation.session, ask)
            assert answer.logits is not None
            scored += [row.copy() for row in answer.logits]
            generation.answer(answer)
    generation.end()
    assert len(scored) == len(tokens) - 1
    for n in (1, 7, len(tokens) - 1):
        (row,) = engine.pair.slots.nearest(tokens[:n]).target.score(tokens[:n])
        assert np.array_equal(row, scored[n - 1])
