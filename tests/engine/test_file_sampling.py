"""Sampling defaults from the target's file (`general.sampling.*`), as llama.cpp applies them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.decoding.sampling_options import Sampling
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import file_sampling, sampling_text

PREFIX = "general.sampling."
RECOMMENDED = {"temp": 0.0, "top_k": 5, "penalty_repeat": 1.5, "penalty_last_n": 8}


def found(**values: object) -> Any:
    return file_sampling({PREFIX + name: value for name, value in values.items()})


def write(path: Path, **values: float | str) -> Path:
    return tiny.write_llama(path, header={PREFIX + name: value for name, value in values.items()})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write(tmp_path_factory.mktemp("models") / "greedy.gguf", **RECOMMENDED)
    with ggufspec.load(path, n_threads=1) as made:
        yield made


def test_values_are_read_from_numbers_and_texts_with_six_decimals() -> None:
    values = {"temp": 0.699999988079071, "top_k": 20.0, "top_p": "0.8", "min_p": 0}
    own = found(**values, penalty_last_n=-1, penalty_repeat=1.05)
    assert own.notes == ()
    asked = {"xtc_probability": 0.5, "xtc_threshold": 0.2, "mirostat": 2, "mirostat_tau": 4.5}
    assert found(**asked) == (asked, ())
    assert found(top_k=-1).options == {"top_k": 0}, "all tokens"
    assert found() == ({}, ())
    assert sampling_text(own.options) == (
        "temperature 0.7, top-k 20, top-p 0.8, min-p 0.0, repeat-last-n -1, repeat-penalty 1.05"
    )


def test_a_sequence_names_the_samplers_in_all_spellings() -> None:
    own = found(sequence="penalties;typ-p;nucleus;min-p;topk;xtc;temp")
    wanted = ("penalties", "typical_p", "top_p", "min_p", "top_k", "xtc", "temperature")
    assert own == ({"samplers": wanted}, ())
    assert sampling_text(own.options) == f"samplers {'; '.join(wanted)}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temp", "warm"),
        ("temp", True),
        ("top_k", float("inf")),
        ("top_k", [1, 2]),
        ("top_p", 3.5),
        ("sequence", "foo"),
    ],
)
def test_an_unusable_value_is_named_and_the_default_remains(key: str, value: object) -> None:
    own = found(**{key: value, "min_p" if key != "min_p" else "top_p": 0.5})
    assert list(own.options.values()) == [0.5]
    assert own.notes[-1].startswith(f"{PREFIX}{key} of the file is not used, but the default: ")


def test_samplers_that_are_not_supported_are_named_once() -> None:
    own = found(sequence="top_k;infill;temperature")
    assert own.options == {"samplers": ("top_k", "temperature")}
    assert [note.split("'")[1] for note in own.notes] == ["infill"]


def test_a_text_takes_from_the_file_what_it_is_not_given(engine: Engine) -> None:
    own = scoring.sampling(engine, [1])
    assert (own.temperature, own.top_k, own.repeat_penalty, own.repeat_last_n) == (0, 5, 1.5, 8)
    assert own.top_p == Sampling.top_p
    assert scoring.sampling(engine, [1], top_k=7).top_k == 7


def test_all_ways_of_generating_use_it(engine: Engine) -> None:
    explicit = {"temperature": 0, "top_k": 5, "repeat_penalty": 1.5, "repeat_last_n": 8}
    wanted = engine.generate("hello", max_tokens=24, **explicit).text  # type: ignore[arg-type]
    assert engine.generate("hello", max_tokens=24).text == wanted
    assert [each.text for each in engine.generate_batch(["hello"], max_tokens=24)] == [wanted]
    with engine.stream("hello", max_tokens=24) as stream:
        assert "".join(chunk.text for chunk in stream) == wanted
    texts = {engine.generate("hello", max_tokens=24, seed=i, temperature=1.5).text for i in (1, 2)}
    assert len(texts) == 2, "a value that is given wins"
