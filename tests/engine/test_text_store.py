"""Texts are drafted from what was written before, and from files that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import PromptError
from ggufspec.standin import embedded

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A length of its own: "auto" depends on measured times.
GREEDY: Any = {"max_tokens": 20, "temperature": 0, "drafter": "auto", "n_draft": 8}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "target.gguf"
    return tiny.write_scripted(path, tiny.SPM.spell(LETTERS))


@pytest.fixture
def engine(target: Path) -> Iterator[Engine]:
    with ggufspec.load(target, n_threads=1) as engine:
        yield engine


def n_accepted(engine: Engine, prompt: str = "hi", **options: Any) -> int:
    found = engine.generate(prompt, **{**GREEDY, **options})
    assert options.get("temperature") or found.text == LETTERS[:20]
    return found.stats.n_accepted


def test_a_text_is_drafted_from_an_earlier_one(engine: Engine) -> None:
    assert n_accepted(engine) == 0, "nothing repeats itself"
    assert n_accepted(engine) >= 10
    assert n_accepted(engine, seed=3) >= 10, "a greedy text is the same with any draft"
    assert n_accepted(engine, drafter="none") == 0
    engine.forget()
    assert n_accepted(engine) == 0


def test_no_more_tokens_than_asked_for_are_remembered(target: Path) -> None:
    for n in (1, 12):
        with ggufspec.load(target, n_threads=1, n_remembered=n) as engine:
            n_accepted(engine)
            assert (n_accepted(engine) > 0) == (n == 12)


def test_a_text_that_a_seed_repeats_is_not(engine: Engine) -> None:
    """Which draft there is decides which random numbers are drawn."""
    options: Any = {
        "max_tokens": 40,
        "temperature": 1.5,
        "seed": 1,
        "n_draft": 4,
        "drafter": "ngram",
    }
    first = engine.generate("hi", **options)
    again = engine.generate("hi", **options)
    assert again.text == first.text
    assert again.stats.n_drafted == first.stats.n_drafted


def test_texts_in_files_are_drafted_from(tmp_path: Path) -> None:
    prompt = "It was the best of"
    written: Any = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    written |= {"drafter": "auto", "n_draft": 8}
    told: list[tuple[str, float]] = []
    options: Any = {"n_threads": 1, "n_ctx": 256, "n_remembered": 0}
    target = embedded.embedded_target()
    with ggufspec.load(target, **options) as engine:
        plain = engine.generate(prompt, **written)
    files = [tmp_path / "first.txt", tmp_path / "empty.txt", tmp_path / "second.txt"]
    for file, text in zip(files, ("Not this.\n" * 9, "", plain.text), strict=True):
        file.write_text(text, encoding="utf-8")
    options["progress"] = lambda *at: told.append(at)
    with ggufspec.load(target, draft_texts=files, **options) as engine:
        found = engine.generate(prompt, **written)
        engine.forget()
        again = engine.generate(prompt, **written, seed=1)
    for completion in (found, again):  # the files stay, and texts with a seed have them, too
        assert completion.text == plain.text
        assert completion.stats.n_rounds < 0.7 * plain.stats.n_rounds
    assert told[-1] == ("draft texts", 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft_texts": ["folder"]}, PromptError, "the draft text folder is a folder; name a"),
        ({"draft_texts": ["none"]}, PromptError, "the draft text none cannot be read: No such"),
        ({"draft_texts": ["binary"]}, PromptError, "the draft text binary is not UTF-8: byte 2"),
    ],
)
def test_what_cannot_be_drafted_from_is_refused(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("binary").write_bytes(b"GG\xff\x00")
    with pytest.raises(error, match=message):
        ggufspec.load(target, **options)
