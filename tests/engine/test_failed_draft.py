"""A text goes on without a draft model that fails, and says so once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.test_prompt_cache import ALL, GREEDY, load, prompt_of

from ggufspec.engine.engine import Engine
from ggufspec.errors import DecodeError
from ggufspec.llama.context import Context


def break_draft(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass of the draft model fails from now on."""
    real = {name: getattr(Context, name) for name in ("decode", "decode_hidden")}

    def decode(name: str) -> Callable[..., None]:
        def checked(self: Context, *arguments: Any) -> None:
            if self is engine.pair.draft:
                raise DecodeError("llama.cpp could not decode 1 tokens (code -3).\n  no memory")
            real[name](self, *arguments)

        return checked

    for name in real:
        monkeypatch.setattr(Context, name, decode(name))


BOUND = {"regex": "[a-z ]{80}"}


@pytest.mark.parametrize(
    ("bound", "drafter"),
    [
        ({}, "model"),
        (BOUND, "auto"),
        (BOUND, "staged"),
    ],
)
def test_a_text_goes_on_without_a_draft_model_that_fails(
    bound: dict[str, Any],
    drafter: str,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    how = {**GREEDY, "max_tokens": 20, **bound, "ignore_eos": bound is not BOUND}
    with load({"target": files[0], "draft": files[1]}) as engine:
        expected = engine.generate(prompt_of(1), **how, drafter="none").tokens
        engine.forget()
        stream = engine.stream(prompt_of(1), **how, drafter=drafter, n_draft=3)
        next(stream)
        break_draft(engine, monkeypatch)
        written = stream.finish()
        assert written.tokens == expected
    assert written.advice is not None
    assert "the draft model has failed (llama.cpp could not decode" in written.advice
    assert len(caplog.messages) == 1
    assert "the draft model has failed, and the text goes on without it" in caplog.messages[0]
    assert stream.rounds[-1].why == "the draft model has failed"


@pytest.mark.parametrize("name", ["draft", "foreign draft"])
def test_so_does_one_whose_prompt_it_cannot_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with load(ALL[name](tmp_path)) as engine:
        expected = engine.generate(prompt_of(1), **GREEDY, drafter="none").tokens
        engine.forget()
        break_draft(engine, monkeypatch)
        for _ in range(2):
            written = engine.generate(prompt_of(1), **GREEDY, drafter="model", n_draft=3)
            assert written.tokens == expected
    assert len(caplog.messages) == 2, "once for each text"


def test_what_another_device_does_not_read_leaves_the_target(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load({"target": files[0], "draft": files[1]}) as engine:
        expected = engine.generate(prompt_of(1), **GREEDY, drafter="none").tokens
        engine.forget()
        engine.pair.are_apart = True
        break_draft(engine, monkeypatch)

        def beside(self: Context, parts: Any, other: Context, of_other: Any) -> None:
            self.decode_together(parts)
            raise DecodeError("could not decode on the other device")

        monkeypatch.setattr(Context, "decode_beside", beside)
        written = engine.generate(prompt_of(1), **GREEDY, drafter="model", n_draft=3)
        assert written.tokens == expected


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_text_goes_on_without_a_head_that_fails(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = ALL[name](tmp_path)
    how: dict[str, Any] = {**GREEDY, "max_tokens": 24, "drafter": "model", "n_draft": 3}
    for n_read in (80, 240):  # the states of the second one are read while the target reads
        with load(files, n_ctx=512) as engine:
            expected = engine.generate(prompt_of(1, n_read), **how).tokens
            engine.forget()
            caplog.clear()
            break_draft(engine, monkeypatch)
            assert engine.generate(prompt_of(1, n_read), **how).tokens == expected
            assert len(caplog.messages) == 1, name
