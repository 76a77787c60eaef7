"""The options of `load` and of `generate`: what is taken, and what is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
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


@pytest.mark.parametrize("stop", [None, (), [], set(), frozenset()], ids=repr)
def test_no_stop_is_one_of_these(engine: Engine, stop: Any) -> None:
    assert text(engine, stop=stop) == LETTERS[:10]


@pytest.mark.parametrize("stop", ["ef", ["ef"], ("ef", "h"), {"h", "ef"}, frozenset({"ef"})])
def test_a_stop_is_a_text_or_any_collection_of_texts(engine: Engine, stop: Any) -> None:
    assert text(engine, stop=stop) == "abcd"


@pytest.mark.parametrize("tokens", [[E], (E,), {E}, frozenset({E}), np.array([E]), range(E, E + 1)])
def test_stop_tokens_are_any_collection(engine: Engine, tokens: Any) -> None:
    assert text(engine, stop_tokens=tokens) == "abcd"
    assert text(engine, stop_tokens=None) == LETTERS[:10]


@pytest.mark.parametrize(
    "options",
    [
        *({"stop": stop} for stop in ("", ["a", ""], 5, b"a", [5], {"a": 1}, {5})),
        *({"stop_tokens": tokens} for tokens in (5, "ab", b"ab", ["a"], [1.5], {5: 1}, [True])),
        *({"samplers": samplers} for samplers in ("temp", {"temp"}, None, ["heat"])),
        *({"max_tokens": n} for n in (-1, 1.5)),
        *({"n_draft": n} for n in (0, -1, 17)),
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"seed": -1},
        {"drafter": "oracle"},
        *({"verify": rule} for rule in ("hope", "_lossy")),
        {"tree": "sometimes"},
    ],
    ids=repr,
)
def test_what_cannot_be_used_is_refused_at_once(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(ggufspec.OptionError):
        engine.stream("hi", **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"n_ctx": "x"}, {"n_threads": 2.5}, {"n_gpu_layers": None}, {"n_batch": 2.5}),
        *({"draft": 5}, {"chat_template": 5}, {"chat_template": b"{{ messages }}"}),
    ],
    ids=repr,
)
def test_what_cannot_be_loaded_is_refused(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(ggufspec.OptionError, match="must be"):
        ggufspec.load(engine.pair.target.model.path, **options)


@pytest.mark.parametrize(
    "name", ["mirostat", "mirostat_mode", "xtc_probability", "adaptive_target"]
)
def test_an_option_that_cannot_be_supported_says_why(engine: Engine, name: str) -> None:
    options: Any = {name: 2}
    with pytest.raises(ggufspec.OptionError, match=f"{name} is not supported: .* no distribution"):
        engine.stream("hi", **options)
    assert text(engine, **{name: 0}) == LETTERS[:10], "0 is off"


def test_an_option_that_there_is_not_is_named(engine: Engine) -> None:
    with pytest.raises(TypeError, match="there is no option heat"):
        engine.stream("hi", heat=1)  # type: ignore[call-arg]


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
    assert found.stats.n_accepted >= 10
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": ""}, "prediction is empty; give at least one token"),
        ({"prediction": []}, "prediction is empty"),
        ({"prediction": 5}, "prediction is 5; it must be a list of token ids"),
        ({"prediction": ["a"]}, "a token of prediction is 'a'"),
        ({"prediction": [10**6]}, "token 1000000 of the prediction is outside the vocabulary"),
        ({"prediction": "ab " * 5000}, "shorten it, or load with a larger context"),
        ({"prediction": "ab", "drafter": "model"}, "the drafter 'model' uses no prediction"),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        engine.generate("hi", **options)
