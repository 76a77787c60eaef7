"""Exact texts: what a token gets does not depend on the pass, the slot, or the texts beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.decoding.types import Logits, Scored
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.logprobs import TokenLogprobs, entry_of
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import OptionError
from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.llama.quantize import requantize
from ggufspec.standin import embedded

# Two begin with the same 80 tokens.
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
    {"tree": "on", "n_draft": 3},
]
pytestmark = pytest.mark.skipif(
    kernels.attention_refusal() is not None, reason="own attention cannot be used here"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in F16: passes over one and over four tokens round differently."""
    path = tmp_path_factory.mktemp("exact") / "target.gguf"
    requantize(embedded.embedded_target(), path, "F16")
    return path


def loaded(target: Path, *, n_ctx: int = 256, **how: Any) -> Engine:
    how = {"n_threads": 1, "tuned": False, "exact": True, "n_draft_max": 3, **how}
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


def test_neither_pieces_nor_slots_nor_threads_matter(
    engine: Engine, target: Path, exact_rows: dict[tuple[int, ...], bytes]
) -> None:
    """A prompt is read in pieces, or goes on from cells, also where those of others lie between."""
    texts = [engine.generate(prompt, **GREEDY).tokens for prompt in PROMPTS]
    shorter = [PROMPTS[3], PROMPTS[2][:200], PROMPTS[2], PROMPTS[0], PROMPTS[2][:90]]
    engine.generate_batch(shorter, **GREEDY, n_draft=3)
    assert [engine.generate(prompt, **GREEDY).tokens for prompt in PROMPTS] == texts
    for how in ({"n_batch": 5}, {"n_threads": 2}, {"n_slots": 2}):
        with loaded(target, **how) as other:
            found = [other.generate(prompt, **GREEDY).tokens for prompt in PROMPTS]
            assert found == texts, how


def test_a_seed_gives_the_same_text_with_drafts_under_the_rule_match(engine: Engine) -> None:
    options = {**GREEDY, "temperature": 0.9, "seed": 3, "verify": "match"}
    plain = engine.generate(PROMPTS[0], **options, drafter="none")
    for way in WAYS:
        assert engine.generate(PROMPTS[0], **{**options, **way}).tokens == plain.tokens, way


def test_by_default_passes_are_exact_too(target: Path) -> None:
    with loaded(target, exact=False) as usual:
        plain, drafted = (
            usual.generate(PROMPTS[2], **GREEDY, drafter=of) for of in ("none", "model")
        )
        assert plain.tokens == drafted.tokens


def test_a_sum_that_depends_on_the_size_of_a_pass_is_found(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    real, real_rows, n = Context.decode, Context.rows, 0

    def decode(self: Context, tokens: Sequence[int], *more: Any) -> None:
        nonlocal n
        n = len(tokens)
        real(self, tokens, *more)

    def rounded(self: Context, first: int, n_rows: int) -> Logits:
        """As kernels of most processors round: by the size of the pass."""
        return np.array(real_rows(self, first, n_rows)) * np.float32(1 + 1e-5 * n)

    monkeypatch.setattr(Context, "decode", decode)
    monkeypatch.setattr(Context, "rows", rounded)
    with pytest.raises(OptionError, match="depend on the size of a pass"):
        loaded(target).close()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"flash_attention": "on"}, "llama.cpp computes its attention, as asked"),
        ({"repack": False}, "llama.cpp's kernels compute its F16 weights"),
        ({"type_k": "q5_1", "type_v": "q5_1"}, "no code for its heads, or for caches of q5_1"),
    ],
)
def test_where_llama_cpp_computes_it_is_refused(
    how: dict[str, Any], why: str, target: Path
) -> None:
    with pytest.raises(OptionError, match=why):
        loaded(target, **how).close()


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    path = tiny.write_mamba(tmp_path / "model.gguf")
    with pytest.raises(OptionError, match="recurrent"):
        ggufspec.load(path, n_ctx=64, exact=True, tuned=False)


def test_scores_of_a_prompt_are_exact_too(engine: Engine) -> None:
    tokens = engine.tokenize(PROMPTS[2])
    engine.forget()
    options = CheckedOptions.of(GREEDY)
    first = TokenLogprobs(entry_of(tokens[0], None, engine.vocab), ())
    text = engine.prepare(tokens, options, n_top=0, prompt_logprobs=[first])
    generation = Generation(engine.pair, text)
    scored: list[Logits] = []
    while generation.is_scoring:
        if (ask := generation.ask()) is not None:
            logits = generation.session.score(*ask[:3])
            scored += [row.copy() for row in logits]
            generation.answer(Scored(logits, 0.0))
    generation.end()
    assert len(scored) == len(tokens) - 1
    for n in (1, 7, len(tokens) - 1):
        (row,) = engine.pair.slots.nearest(tokens[:n]).target.score(tokens[:n])
        assert np.array_equal(row, scored[n - 1])
