"""A small model drafts for `llama_cpp.Llama`: the text stays, and the large one is asked less."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import tiny
from greedy import assert_same

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import ClosedError, OptionError, VocabError
from ggufspec.llama.context import Context
from ggufspec.standin.embedded import embedded_draft, embedded_target

PROMPTS = ["It was a dark night, and", '"My dear Watson," said', "The king rose and"]
N_TOKENS = 60

MakeLlama = Callable[..., Any]
MakeDraft = Callable[..., ggufspec.DraftModel]


@pytest.fixture
def draft_model() -> Iterator[MakeDraft]:
    made: list[ggufspec.DraftModel] = []

    def make(path: str | Path = embedded_draft(), **how: Any) -> ggufspec.DraftModel:  # noqa: B008
        made.append(ggufspec.DraftModel(path, n_threads=1, **{"n_ctx": 512, **how}))
        return made[-1]

    yield make
    for draft in made:
        draft.close()


@pytest.fixture
def llama() -> Iterator[MakeLlama]:
    made: list[Any] = []

    def make(path: str | Path = embedded_target(), **how: Any) -> Any:  # noqa: B008
        options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **how}
        made.append(llama_cpp.Llama(str(path), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def greedy(llama: Any, prompt: list[int], n_tokens: int = N_TOKENS) -> list[int]:
    """The tokens of a greedy continuation."""
    return list(itertools.islice(llama.generate(prompt, temp=0.0), n_tokens))


@pytest.fixture(scope="module")
def judge() -> Iterator[Engine]:
    """The target alone, as `llama_cpp.Llama` computes it."""
    with ggufspec.load(embedded_target(), n_ctx=512, n_threads=1, flash_attention="off") as engine:
        yield engine


def test_the_text_is_the_one_without_a_draft(
    llama: MakeLlama, draft_model: MakeDraft, judge: Engine
) -> None:
    plain, with_draft = llama(), llama(draft_model=draft_model())
    for text in PROMPTS:
        prompt = plain.tokenize(text.encode())
        wanted = greedy(plain, prompt)
        assert_same(judge, prompt, greedy(with_draft, prompt), wanted)


def test_what_was_drafted_is_not_evaluated_again(
    draft_model: MakeDraft, decoded: list[int]
) -> None:
    draft = draft_model(n_draft=4)
    text = np.arange(100, 140, dtype=np.intc)
    drafted = draft(text)
    draft(np.array([*text, *drafted, 200], np.intc))  # all was accepted
    draft(np.array([*text, *drafted, 200, 201], np.intc))  # nothing was accepted
    assert decoded == [40, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1]


def test_a_draft_stops_where_its_text_ends(tmp_path: Path, draft_model: MakeDraft) -> None:
    script = tiny.SPM.spell("abc")
    path = tiny.write_scripted(tmp_path / "model.gguf", script, then=tiny.SPM.eos)
    draft = draft_model(path, n_draft=10, n_ctx=64)
    assert draft(np.array([1, script[0]], np.intc)).tolist() == [*script[1:], tiny.SPM.eos]


def test_a_vocabulary_without_a_common_token_is_refused(
    llama: MakeLlama, draft_model: MakeDraft, tmp_path: Path
) -> None:
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=tiny.SILENT)
    with_draft = llama(
        tiny.write_llama(tmp_path / "target.gguf"),
        n_ctx=64,
        draft_model=draft_model(draft, n_ctx=64),
    )
    for _ in range(2):
        with pytest.raises(VocabError, match="no token in common"):
            greedy(with_draft, [40], 5)


def test_a_draft_of_another_vocabulary_drafts_tokens_of_the_target(
    llama: MakeLlama,
    draft_model: MakeDraft,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripts = [[*map(vocab.id_of, "abcdefghij")] for vocab in (tiny.SPM, tiny.BPE)]
    target = tiny.write_scripted(tmp_path / "target.gguf", scripts[0])
    other = tiny.write_scripted(tmp_path / "draft.gguf", scripts[1], vocab=tiny.BPE)
    with_draft = llama(target, n_ctx=64, draft_model=draft_model(other, n_ctx=64))
    n_evaluations = 0
    evaluate = with_draft.eval

    def counting(tokens: list[int]) -> None:
        nonlocal n_evaluations
        n_evaluations += 1
        evaluate(tokens)

    monkeypatch.setattr(with_draft, "eval", counting)
    assert greedy(with_draft, [1, *scripts[0]], 40) == 4 * scripts[0]
    assert n_evaluations < 20


# The end of the context


def test_a_draft_ends_with_the_context(draft_model: MakeDraft) -> None:
    draft = draft_model(n_draft=6, n_ctx=32)
    text = np.arange(100, 200, dtype=np.intc)
    for n_tokens, n_drafted in ((20, 6), (26, 6), (27, 5), (31, 1), (32, 0), (33, 0), (100, 0)):
        assert len(draft(text[:n_tokens])) == n_drafted
    assert len(draft(text[:10])) == 6, "a shorter text is drafted for as before"


@pytest.mark.parametrize(("n_ctx", "n_ctx_draft"), [(64, 32), (256, 512)])
def test_a_text_may_fill_the_target_s_context(
    llama: MakeLlama,
    draft_model: MakeDraft,
    judge: Engine,
    n_ctx: int,
    n_ctx_draft: int,
) -> None:
    # A draft's context that is larger than the target's helps only where the target's is a
    # multiple of 256: llama-cpp-python forgets to cut the last draft otherwise.
    plain = llama(n_ctx=n_ctx)
    with_draft = llama(n_ctx=n_ctx, draft_model=draft_model(n_ctx=n_ctx_draft, n_draft=5))
    prompt = plain.tokenize(PROMPTS[2].encode())
    n_tokens = n_ctx - len(prompt)
    wanted, written = (greedy(one, prompt, n_tokens) for one in (plain, with_draft))
    assert len(written) == n_tokens
    assert_same(judge, prompt, written, wanted)


# Opening and closing


def test_a_closed_draft_says_so(draft_model: MakeDraft) -> None:
    draft = draft_model()
    text = np.arange(100, 120, dtype=np.intc)
    assert len(draft(text)) > 0
    draft.close()
    draft.close()
    for shown in (text, text[:5], np.arange(30, dtype=np.intc)):
        with pytest.raises(ClosedError, match="closed"):
            draft(shown)


@pytest.mark.parametrize("how", [{"n_draft": 0}, {"n_ctx": "3"}, {"n_gpu_layers": "all"}])
def test_wrong_counts_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"must be (at least 1|a whole number)"):
        ggufspec.DraftModel(embedded_draft(), **how)


def test_a_draft_model_that_is_dropped_frees_its_memory(
    llama: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[Context] = []
    close = Context.close

    def watched(self: Context) -> None:
        freed.append(self)
        close(self)

    monkeypatch.setattr(Context, "close", watched)
    draft = ggufspec.DraftModel(embedded_draft(), n_ctx=512, n_threads=1)
    target = llama(draft_model=draft)
    assert greedy(target, target.tokenize(b"It was"), 4)
    target.draft_model = None
    del draft
    assert len(freed) == 1
