"""Saving an old text is best effort: where it fails, no other text does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny
from engine.test_prompt_cache import ALL, GREEDY, load, prompt_of

from ggufspec.drafting import profile_store
from ggufspec.engine.engine import Engine
from ggufspec.errors import ClosedError, DecodeError
from ggufspec.llama import saved_text
from ggufspec.llama.context import Context
from ggufspec.llama.saved_text import SavedText

MIB = 2**20
TOO_LARGE = 2**60  # bytes


def texts_of(engine: Engine) -> list[Sequence[int]]:
    """Three texts, then the same ones again, in one slot."""
    prompts = [prompt_of(which) for which in range(3)] * 2
    return [engine.generate(prompt, **GREEDY).tokens for prompt in prompts]


def test_a_copy_never_exceeds_the_limit_beside_the_texts_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, held = saved_text.save, []

    def noted(context: Context, sequence: int) -> SavedText | None:
        saved = real(context, sequence)
        assert saved is not None
        held.append(engine.pair.slots.cache.n_held + saved.n_bytes)
        return saved

    monkeypatch.setattr(saved_text, "save", noted)
    with load({"target": tiny.write_llama(tmp_path / "t.gguf", n_embd=256)}, cache_ram=1) as engine:
        for which in range(12):
            engine.generate(prompt_of(which, 200), **GREEDY)
    assert MIB / 2 < max(held) <= MIB


def fails(*_: Any) -> Any:
    raise DecodeError("llama.cpp saved 0 of 9 bytes\n  of a text")


def is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for a copy cannot be allocated, although its size seemed to be small."""
    name = "llama_state_seq_get_size_ext"
    monkeypatch.setattr(Context, "n_bytes", lambda *_: 1000)
    monkeypatch.setattr(llama_cpp, name, lambda *_: TOO_LARGE)


FAILURES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "copy": lambda monkeypatch: monkeypatch.setattr(saved_text, "save", fails),
    "memory": is_too_large,
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("write", [tiny.write_llama, tiny.write_hybrid])
def test_a_text_that_cannot_be_saved_fails_no_other(
    write: Callable[[Path], Path],
    failure: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checkpoints of the hybrid model are saved in the same way."""
    target = write(tmp_path / "target.gguf")
    with load({"target": target}, cache_ram=0) as engine:
        expected = texts_of(engine)
    FAILURES[failure](monkeypatch)
    with load({"target": target}) as engine:
        assert texts_of(engine) == expected
        assert engine.pair.slots.cache.n_texts == 0
    lines = [line for line in caplog.messages if "a text was not kept for later prompts" in line]
    assert len(lines) == len(expected) - 1
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize("name", ["mamba", "rollback"])
def test_a_checkpoint_that_cannot_be_saved_fails_no_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "drafter": "model", "n_draft": 4}
    with load(ALL[name](tmp_path)) as engine:
        expected = engine.generate(prompt_of(0), **how)
        engine.forget()
        monkeypatch.setattr(Context, "checkpoint", fails)
        found = engine.generate(prompt_of(0), **how)
    assert (found.tokens, found.stats.n_drafted) == (expected.tokens, expected.stats.n_drafted)
    lines = [line for line in caplog.messages if "a checkpoint was not saved" in line]
    assert lines
    assert not [line for line in caplog.messages if "the draft model has failed" in line]


def test_models_are_freed_where_a_profile_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    engine = load(ALL["draft"](tmp_path), tuned=True)
    engine.generate("hello", max_tokens=32, ignore_eos=True)
    monkeypatch.setattr(profile_store, "remember", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    with pytest.raises(ClosedError):
        engine.pair.target.pointer  # noqa: B018  (raises)
