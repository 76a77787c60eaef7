"""Target and draft read a prompt at the same time where they compute on different devices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny
from patience import at_most, ctrl_c_in_a_batch

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.model import Model

PROMPT = [5 + i % 90 for i in range(700)]
GREEDY: Any = {"max_tokens": 8, "temperature": 0.0, "drafter": "model", "n_draft": 2}


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Engine]:
    target = tiny.write_llama(tmp_path / "target.gguf", n_ctx_train=2048)
    mapped = tiny.write_llama(tmp_path / "mapped.gguf", n_ctx_train=2048, vocab=tiny.BPE)

    def load(*, has_other_vocabulary: bool = False, apart: bool = True, **options: Any) -> Engine:
        draft = mapped if has_other_vocabulary else target
        options = {"n_threads": 1, "tuned": False, "n_batch": 64, **options}
        engine = ggufspec.load(target, draft, **options)
        assert not engine.pair.are_apart, "both are on the processor"
        engine.pair.are_apart = apart
        return engine

    return load


@pytest.mark.parametrize(("n_slots", "has_other_vocabulary"), [(1, False), (2, True)])
def test_a_text_its_progress_and_its_statistics_are_the_same(
    n_slots: int, has_other_vocabulary: bool, pair: Callable[..., Engine]
) -> None:
    found = []
    how: dict[str, Any] = {"has_other_vocabulary": has_other_vocabulary, "n_slots": n_slots}
    for apart in (False, True):
        heard: dict[str, list[tuple[int, int]]] = {"target": [], "draft": []}
        with pair(apart=apart, **how) as engine:
            done = engine.generate(
                PROMPT, progress=lambda whose, *at, to=heard: to[whose].append(at), **GREEDY
            )
            again = engine.generate([*PROMPT, 7, 8], **GREEDY)
            assert engine.pair.draft is not None
            n_held = [at.n_cells() for at in (engine.pair.target, engine.pair.draft)]
        assert done.stats.seconds.prompt > 0
        counts = (done.stats.n_prompt, again.stats.n_prompt_reused, n_held)
        found.append((done.tokens, again.tokens, heard, counts))
        assert all(each[-1][0] == each[-1][1] for each in heard.values())
        assert len(heard["target"]) >= len(PROMPT) // 64
    assert found[0] == found[1]


def test_both_compute_at_the_same_time(pair: Callable[..., Engine]) -> None:
    """In one batch that takes far longer than a thread to start, whatever else runs here."""
    with pair(n_batch=2000) as engine:
        stream = engine.stream([5] * 2000, **GREEDY)
        next(stream)
        contexts = [context for context in (engine.pair.target, engine.pair.draft) if context]
        before = sum(context.decode_seconds for context in contexts)
        stream.close()
        seconds = stream.completion.stats.seconds.prompt
    assert before > 1.1 * seconds, "one after the other, they take no less than the sum"


def test_texts_of_several_slots_are_those_of_one(pair: Callable[..., Engine]) -> None:
    prompts = [PROMPT[:n] for n in (300, 150, 90)]
    with pair() as engine:
        alone = [engine.generate(prompt, **GREEDY).tokens for prompt in prompts]
    with pair(n_slots=3) as engine:
        assert [each.tokens for each in engine.generate_batch(prompts, **GREEDY)] == alone


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such alarm")
def test_ctrl_c_ends_both_batches(tmp_path: Path) -> None:
    n = 6_000
    target = tiny.write_llama(tmp_path / "target.gguf", n_ctx_train=n + 100)
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_ctx_train=n + 100, n_layer=1)
    options: Any = {"n_ctx": n + 100, "n_batch": n, "n_threads": 1, "tuned": False}
    with at_most(), ggufspec.load(target, draft, **options) as engine:
        engine.pair.are_apart = True
        assert engine.pair.draft is not None
        expected = engine.generate("another text", **GREEDY).tokens
        text = engine.tokenize("another text")
        with ctrl_c_in_a_batch():
            engine.generate([*text, *[5] * n], **GREEDY)
        assert engine.pair.target.n_cells() <= len(text)
        assert engine.pair.draft.n_cells() <= len(text)
        assert engine.generate("another text", **GREEDY).tokens == expected


def test_what_fails_in_one_leaves_the_other(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    bad = [10**6]  # no token of the vocabulary
    with closing(Model(path)) as model:
        options = ContextOptions(n_ctx=64, n_threads=1)
        with closing(Context(model, options)) as a, closing(Context(model, options)) as b:
            good = [BatchPart(0, [5, 6, 7], 1)]
            with pytest.raises(DecodeError, match="could not decode 1 token at position 0"):
                a.decode_beside(good, b, [BatchPart(0, bad, 0)])
            assert (a.n_cells(), b.n_cells()) == (3, 0)
            with pytest.raises(DecodeError):
                a.decode_beside([BatchPart(0, bad, 0)], b, good)
            assert (a.n_cells(), b.n_cells()) == (3, 3)
            assert (a.rows(2, 1) == b.rows(2, 1)).all()
            with pytest.raises(ValueError, match="another context"):
                a.decode_beside(good, a, good)
            b.close()
            with pytest.raises(ClosedError):
                a.decode_beside(good, b, good)
            assert a.n_cells() == 3


def test_a_prompt_that_the_first_round_reads_is_timed_once(tmp_path: Path) -> None:
    """Too short a time would make copies of texts seem too slow to be worth it."""
    target = tiny.write_llama(tmp_path / "target.gguf", n_embd=128, n_layer=4)
    how: dict[str, Any] = {"n_ctx": 256, "n_batch": 256, "n_slots": 2, "n_threads": 1}
    with ggufspec.load(target, tuned=False, cache_ram=64, **how) as engine:
        prompt = PROMPT[:200]
        seconds = engine.generate(prompt, max_tokens=8).stats.seconds.prompt
        text = next(text for slot in engine.pair.slots if (text := slot.saved(prompt)))
        cache = engine.pair.slots.cache
        cache.observe_copy(text.n_bytes, 0.7 * seconds)
        cache.add(text)
        assert cache.take(prompt, 0) is text
