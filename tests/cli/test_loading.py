"""Progress on stderr: also of work that reports nothing for a while, at terminals and in files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest
from patience import comes_true

from ggufspec.cli import loading
from ggufspec.cli.loading import LateBars, late_bars


class Stderr(io.StringIO):
    """`is_terminal`: what it says of itself."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def has(self, text: str) -> bool:
        return comes_true(lambda: text in self.getvalue())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(loading, "LINE_SECONDS", 0.03)
    monkeypatch.setenv("TERM", "xterm-256color")


@contextmanager
def shown(*, on_terminal: bool) -> Iterator[tuple[LateBars, Stderr]]:
    """Bars, and what they show."""
    stderr = Stderr(is_terminal=on_terminal)
    with redirect_stderr(stderr), late_bars() as bars:
        yield bars, stderr


@pytest.mark.parametrize("on_terminal", [True, False])
def test_each_step_is_shown_while_it_reports_nothing(on_terminal: bool) -> None:
    with shown(on_terminal=on_terminal) as (bars, stderr):
        for step, text in {
            "kernels": "Trying kernels, once on this machine",
            "target": "Loading the target",
            "draft": "Loading the draft",
            "contexts": "Measuring attention, and making contexts",
        }.items():
            bars.load(step, 0.0)
            assert stderr.has(text)
            bars.load(step, 1.0)
        for step, text in {"costs": "the pair", "draft costs": "the draft", "x": "(x)"}.items():
            bars.prompt(step, 0, 20)
            assert stderr.has(text)
            bars.prompt(step, 20, 20)
        assert on_terminal or not comes_true(lambda: "100%" in stderr.getvalue(), within=0.1)


def test_a_line_in_a_file_says_how_far_it_is() -> None:
    with shown(on_terminal=False) as (bars, stderr):
        bars.download("model.gguf", 0, 100)
        assert stderr.has("model.gguf (0 s so far)\n")
        bars.download("model.gguf", 50, 100)
        assert stderr.has(" 50%, about 0 s left: model.gguf\n")


def test_what_is_done_or_closed_is_not_shown() -> None:
    with shown(on_terminal=False) as (bars, stderr):
        bars.load("target", 0.0)
        bars.load("target", 1.0)
        bars.load("draft", 0.0)
        assert stderr.has("Loading the draft")
        bars.close()
        assert "target" not in stderr.getvalue()
        n_shown = len(stderr.getvalue())
        assert not comes_true(lambda: len(stderr.getvalue()) > n_shown, within=0.1)


def test_short_work_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LINE_SECONDS", 60.0)
    with shown(on_terminal=False) as (bars, stderr):
        for share in (0.0, 0.5, 0.9):
            bars.load("target", share)
        assert not comes_true(stderr.getvalue, within=0.05)
