"""The options of `generate`: which types are taken, and what predictions do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.standin import embedded

LETTERS = "abcdefghijklmnopqrstuvwxyz"
E = tiny.SPM.spell("e")[0]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Writes the alphabet, over and over."""
    path = tmp_path_factory.mktemp("models") / "alphabet.gguf"
    with ggufspec.load(tiny.write_scripted(path, tiny.SPM.spell(LETTERS)), n_threads=1) as made:
        yield made


def text(engine: Engine, **options: Any) -> str:
    return engine.generate("hi", max_tokens=10, temperature=0, **options).text


def test_stops_are_a_text_or_any_collection(engine: Engine) -> None:
    for nothing in (None, (), set()):
        assert text(engine, stop=nothing, stop_tokens=nothing) == LETTERS[:10]
    for stop in ("ef", ["ef"], ("ef", "h"), {"h", "ef"}, frozenset({"ef"})):
        assert text(engine, stop=stop) == "abcd"
    assert text(engine, stop="jkl") == LETTERS[:10], "the j was held back"
    for tokens in ([E], {E}, np.array([E]), range(E, E + 1)):
        assert text(engine, stop_tokens=tokens) == "abcd"


def test_a_closed_engine_refuses_an_empty_batch_too(tmp_path: Path) -> None:
    engine = ggufspec.load(tiny.write_llama(tmp_path / "model.gguf"), n_threads=1)
    assert engine.generate_batch([]) == []
    engine.close()
    with pytest.raises(ggufspec.ClosedError):
        engine.generate_batch([])


@pytest.mark.parametrize("predicted", [LETTERS[:20], LETTERS[:4] + "?!" + LETTERS[6:20]])
def test_a_prediction_is_drafted_and_does_not_change_the_text(
    engine: Engine, predicted: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    engine.forget()
    plain = engine.generate("hi", **options)
    prediction = tiny.SPM.spell(predicted)
    engine.forget()
    found = engine.generate("hi", prediction=prediction, **options)
    assert found.text == plain.text == LETTERS[:20]
    assert plain.stats.n_accepted == 0, "nothing repeats itself"
    assert found.stats.n_accepted >= 5, "how far depends on times, which are longer beside others"
    fixed = engine.generate("hi", prediction=prediction, n_draft=4, **options)
    assert fixed.text == plain.text
    assert fixed.stats.n_accepted >= 10
    without = engine.generate("hi", prediction=prediction, drafter="none", **options)
    assert (without.text, without.stats.n_drafted) == (plain.text, 0)


def test_a_prediction_may_be_a_text_that_is_right_in_parts() -> None:
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with ggufspec.load(embedded.embedded_target(), n_threads=1, n_ctx=256) as engine:
        plain = engine.generate("It was the best of", drafter="none", **options)
        found = {
            predicted: engine.generate("It was the best of", prediction=predicted, **options)
            for predicted in (plain.text, f"A line that is not there.\n{plain.text[20:]}")
        }
    for completion in found.values():
        assert completion.text == plain.text
        assert completion.stats.n_rounds < 0.5 * plain.stats.n_rounds
