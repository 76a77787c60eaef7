"""Texts that leave their slots are kept, and copied back: later turns read only what is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.prompt_cache import PromptCache
from ggufspec.errors import DecodeError
from ggufspec.llama import kernels, saved_text
from ggufspec.standin import embedded

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
MIB = 2**20


# Conversations


Files = dict[str, Any]  # arguments of load


def plain(folder: Path) -> Files:
    return {"target": tiny.write_llama(folder / "target.gguf")}


def with_draft(folder: Path) -> Files:
    return {**plain(folder), "draft": tiny.write_llama(folder / "draft.gguf", n_layer=1)}


def with_foreign_draft(folder: Path) -> Files:
    vocab = tiny.bpe_vocab(words=(*tiny.WORDS, " zebra", " quilt"))
    return {
        **plain(folder),
        "draft": tiny.write_llama(folder / "draft.gguf", vocab=vocab, n_layer=1),
    }


def with_short_draft(folder: Path) -> Files:
    return {**with_draft(folder), "n_ctx_draft": 64}


def same(write: Callable[..., Path]) -> Callable[[Path], Files]:
    """A model that drafts for one like it, with other weights."""

    def files(folder: Path) -> Files:
        target = write(folder / "target.gguf")
        return {"target": target, "draft": write(folder / "draft.gguf", perturb=0.1)}

    return files


def alone(write: Callable[..., Path]) -> Callable[[Path], Files]:
    return lambda folder: {"target": write(folder / "target.gguf")}


def headed(write: head_pairs.Writer) -> Callable[[Path], Files]:
    def files(folder: Path) -> Files:
        pair = write(folder)
        return {"target": pair.target, "draft": pair.draft}

    return files


MODELS: dict[str, Callable[[Path], Files]] = {
    "plain": plain,
    "draft": with_draft,
    "foreign draft": with_foreign_draft,
    "mamba": same(tiny.write_mamba),
    "rwkv": alone(tiny.write_rwkv),
    "hybrid": same(tiny.write_hybrid),
    "rollback": same(tiny.write_qwen35),
    "windows": same(tiny.write_swa),
}
HEADS = {name: headed(write) for name, write in head_pairs.WRITERS.items()}
ALL = {**MODELS, **HEADS}
# One for each kind of session and of memory.
KINDS = ("draft", "foreign draft", "mamba", "hybrid", "rollback", "windows")
KINDS += ("glm4moe", "eagle3", "gemma4", "dflash2")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return ALL[kind](tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _copying_is_cheap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is with models that take longer than these to read a text."""
    if "faster" not in request.node.name:
        monkeypatch.setattr(PromptCache, "observe_copy", lambda *_: None)


def load(files: Files, **options: Any) -> Engine:
    how = {"n_ctx": 256, "n_batch": 32, "n_threads": 1, "tuned": False, "cache_ram": 64}
    return ggufspec.load(**{**files, **how, **options})


def how_of(files: Files) -> dict[str, Any]:
    drafter = "model" if "draft" in files else "ngram"
    return {**GREEDY, "drafter": drafter, "n_draft": 4}


def prompt_of(which: int, n: int = 80) -> list[int]:
    return [3 + (31 * which + (7 + 2 * which) * i) % 200 for i in range(n)]


def in_turns(
    engine: Engine, n_conversations: int, n_turns: int = 3, **how: Any
) -> list[list[ggufspec.Completion]]:
    """What is written in each turn of each conversation."""
    prompts = [prompt_of(which) for which in range(n_conversations)]
    turns = []
    for turn in range(n_turns):
        written = []
        for prompt in prompts:
            written.append(engine.generate(prompt, **how))
            prompt += [*written[-1].tokens, *prompt_of(40 + turn, 12)]
        turns.append(written)
    return turns


def tokens_of(turns: Sequence[Sequence[ggufspec.Completion]]) -> list[tuple[int, ...]]:
    return [written.tokens for turn in turns for written in turn]


def test_two_conversations_on_one_slot_read_what_is_new(kind: str, files: Files) -> None:
    how = how_of(files)
    with load(files) as engine, load(files, cache_ram=0) as without:
        found, expected = in_turns(engine, 2, **how), in_turns(without, 2, **how)
        assert tokens_of(found) == tokens_of(expected)
        assert engine.pair.slots.cache.n_texts == 1  # the other one is in the slot
    for turn in found[1:]:
        for written in turn:
            n_new = written.stats.n_prompt - written.stats.n_prompt_reused
            assert n_new <= 12 + 3, kind  # rejected drafts, and the last tokens
    if kind in HEADS:
        rates = [
            [each.stats.acceptance for turn in turns for each in turn]
            for turns in (found, expected)
        ]
        assert rates[0] == rates[1]


def test_a_turn_that_departs_earlier_gets_the_text_of_a_new_conversation(
    kind: str, files: Files
) -> None:
    """Also where cells or states that it would need were not saved, or were copied back."""
    how = how_of(files)
    with load(files) as engine, load(files, cache_ram=0) as fresh:
        for n_kept in (10, 79, 84):
            first = engine.generate(prompt_of(1), **how)
            engine.generate(prompt_of(2), **how)
            longer = [*prompt_of(1), *first.tokens]
            for prompt in (
                [*longer[:n_kept], *prompt_of(5, 10)],
                [*prompt_of(2), *prompt_of(6, 5)],
                [*prompt_of(2)[:70], *prompt_of(7, 5)],
            ):
                fresh.forget()
                assert engine.generate(prompt, **how).tokens == fresh.generate(prompt, **how).tokens


@pytest.mark.parametrize("write", [tiny.write_swa, tiny.write_mamba, tiny.write_llama])
def test_a_draft_that_was_rejected_is_not_kept(write: Callable[..., Path], tmp_path: Path) -> None:
    draft = tiny.write_llama(tmp_path / "draft.gguf", seed=9)
    with load({"target": write(tmp_path / "target.gguf"), "draft": draft}) as engine:
        how: dict[str, Any] = {**GREEDY, "drafter": "model", "n_draft": 4, "max_tokens": 40}
        written = engine.generate(prompt_of(1), **how).tokens[:6]
        how["stop_tokens"] = written[-1:]
        n_written = len(engine.generate(prompt_of(1), **how).tokens)
        (slot,) = engine.pair.slots
        assert slot.target.n_held > 80 + n_written
        text = slot.saved()
        assert text is not None
        assert list(text.tokens) == [*prompt_of(1), *written[:n_written]][: len(text.tokens)]
        assert len(text.tokens) >= 79  # a recurrent state goes back to one that was kept


@pytest.mark.parametrize("name", ["draft", "hybrid", "eagle3"])
def test_more_conversations_than_slots(name: str, tmp_path: Path) -> None:
    files = ALL[name](tmp_path)
    how = how_of(files)
    with load(files, n_slots=2) as engine, load(files, cache_ram=0) as without:
        found, expected = in_turns(engine, 4, **how), in_turns(without, 4, **how)
        assert tokens_of(found) == tokens_of(expected)
        assert engine.pair.slots.cache.n_texts == 2
    for written in (each for turn in found[1:] for each in turn):
        assert written.stats.n_prompt - written.stats.n_prompt_reused <= 12 + 3


def test_a_draft_that_leaves_out_a_part_of_the_text_reads_it_anew(tmp_path: Path) -> None:
    files = with_short_draft(tmp_path)
    how = how_of(files)
    with load(files) as engine, load(files, cache_ram=0) as without:
        assert tokens_of(in_turns(engine, 2, **how)) == tokens_of(in_turns(without, 2, **how))


@pytest.mark.skipif(kernels.attention_refusal() is not None, reason="exact cannot be used here")
def test_logits_have_the_same_bits_after_a_restore(
    exact_rows: dict[tuple[int, ...], bytes],
) -> None:
    files = {"target": embedded.embedded_target(), "draft": embedded.embedded_draft()}
    how: dict[str, Any] = {"exact": True, "n_draft_max": 3}
    with load(files, **how) as engine, load(files, **how, cache_ram=0) as without:
        turns = in_turns(engine, 2, **{**GREEDY, "n_draft": 3, "drafter": "model"})
        others = in_turns(without, 2, **{**GREEDY, "drafter": "none"})
        assert tokens_of(turns) == tokens_of(others)
    assert exact_rows
    for written in turns[1]:
        assert written.stats.n_prompt_reused > 64


def test_a_text_with_a_seed_stays_the_same(tmp_path: Path) -> None:
    files = with_draft(tmp_path)
    how: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 30, "n_draft": "auto"}
    with load(files) as engine:
        first = engine.generate(prompt_of(1), **how)
        engine.generate(prompt_of(2), **how)
        again = engine.generate(prompt_of(1), **how)
        assert again.stats.n_prompt_reused >= 79
        assert again.tokens == first.tokens


def test_all_sessions_hold_the_text_that_is_copied_back(kind: str, files: Files) -> None:
    with load(files) as engine:
        engine.generate(prompt_of(1), **how_of(files))
        (slot,) = engine.pair.slots
        text = slot.saved()
        assert text is not None
        slot.forget()
        assert not any(session.n_common(text.tokens) for session in slot.sessions if session)
        slot.restore(text)
        held = [session.n_common(text.tokens) for session in slot.sessions if session]
    assert len(text.tokens) >= 80
    assert min(held) >= len(text.tokens) - 5, held  # drafts may not have read the last round


@pytest.mark.parametrize("name", ["mamba", "windows"])
def test_checkpoints_are_copied_with_a_text(name: str, tmp_path: Path) -> None:
    files = ALL[name](tmp_path)
    with load(files) as engine:
        engine.generate(prompt_of(1), **how_of(files))
        engine.generate(prompt_of(2), **how_of(files))
        written = engine.generate([*prompt_of(1), *prompt_of(7, 6)], **how_of(files))
    assert 60 < written.stats.n_prompt_reused <= 80


# Memory


def test_without_room_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_text, "save", None)  # is not called
    with load(plain(tmp_path), cache_ram=0) as engine:
        in_turns(engine, 3, 2, **GREEDY)
        assert engine.pair.slots.cache.n_texts == 0


def test_short_texts_and_small_changes_are_not_kept(tmp_path: Path) -> None:
    with load(plain(tmp_path)) as engine:
        for which in range(3):
            engine.generate(prompt_of(which, 40), **GREEDY)
        engine.generate(prompt_of(9), **GREEDY)
        engine.generate([*prompt_of(9)[:75], 5], **GREEDY)
        assert engine.pair.slots.cache.n_texts == 0


def test_forget_drops_the_texts_kept(tmp_path: Path) -> None:
    with load(plain(tmp_path)) as engine:
        in_turns(engine, 3, 1, **GREEDY)
        assert engine.pair.slots.cache.n_texts == 2
        engine.forget()
        assert engine.pair.slots.cache.n_texts == 0
        assert engine.generate(prompt_of(0), **GREEDY).stats.n_prompt_reused == 0


# What goes wrong


@pytest.mark.parametrize(("name", "at"), [("draft", 0), ("hybrid", 1), ("eagle3", 1)])
def test_a_copy_that_fails_leaves_the_prompt_to_be_read(
    name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy is that of the target, the second that of its draft."""
    files = ALL[name](tmp_path)
    how, real, calls = how_of(files), saved_text.restore, count()

    def failing(*arguments: Any) -> None:
        if next(calls) == at:
            raise DecodeError("no room")
        real(*arguments)

    with load(files) as engine, load(files, cache_ram=0) as without:
        monkeypatch.setattr(saved_text, "restore", failing)
        found, expected = in_turns(engine, 2, **how), in_turns(without, 2, **how)
        assert tokens_of(found) == tokens_of(expected)
        assert next(calls) > at
    assert found[1][0].stats.n_prompt_reused < 20


def test_cells_of_another_model_are_refused(tmp_path: Path) -> None:
    files = with_draft(tmp_path)
    other = {"target": tiny.write_llama(tmp_path / "other.gguf", n_embd=64)}
    with load(files) as engine, load(other) as foreign:
        foreign.generate(prompt_of(1), **GREEDY)
        (slot,), (mine,) = foreign.pair.slots, engine.pair.slots
        text = slot.target.save(slot.target.held)
        assert text is not None
        expected = engine.generate(prompt_of(1), **GREEDY)
        with pytest.raises(DecodeError, match=r"restored 0 of [\d]+ bytes"):
            mine.target.restore(text)
        assert mine.target.n_held == 0
        assert engine.generate(prompt_of(1), **GREEDY).tokens == expected.tokens
