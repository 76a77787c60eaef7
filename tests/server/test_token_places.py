"""What responses say of single tokens does not depend on how many come at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from serving import Live, events_of, serving

import ggufspec

WIDE = "é日本ok"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Writes characters of several tokens."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    tiny.write_timed(path, tiny.SPM.spell(WIDE), n_prompt=2)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


def test_places_count_characters_that_are_whole(wide: Live) -> None:
    tokens = tiny.SPM.spell(WIDE)
    asked = {"prompt": "hello", "logprobs": 0, "temperature": 0, "max_tokens": len(tokens)}
    (choice,) = wide.ok("/v1/completions", **asked)["choices"]
    assert choice["text"] == WIDE
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 4]


@pytest.mark.parametrize("asked", [{}, {"stop": "ok."}, {"echo": True}])
def test_a_stream_has_the_places_of_the_whole_text(wide: Live, asked: dict[str, Any]) -> None:
    asked = {"prompt": "hello é", "logprobs": 0, "temperature": 0, "max_tokens": 24, **asked}
    (choice,) = wide.ok("/v1/completions", **asked)["choices"]
    events = events_of(wide.post("/v1/completions", stream=True, **asked))
    found = [choice["logprobs"] for event in events for choice in event["choices"]]
    places = [place for each in found if each for place in each["text_offset"]]
    assert places == choice["logprobs"]["text_offset"]
    for token, place in zip(choice["logprobs"]["tokens"], places, strict=True):
        if not token.startswith("bytes:") and token != "<s>":
            assert choice["text"][place:].startswith(token if place else token.lstrip())


def test_an_echo_has_places_in_the_prompt_as_it_was_sent(wide: Live, live: Live) -> None:
    asked = {"logprobs": 0, "echo": True, "max_tokens": 0}
    (choice,) = wide.ok("/v1/completions", prompt="hello the é", **asked)["choices"]
    assert choice["logprobs"]["tokens"][:3] == ["<s>", " hello", " the"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5, 9, 10, 10]
    (choice,) = live.ok("/v1/completions", prompt="a<|im_end|>b", **asked)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 11]
