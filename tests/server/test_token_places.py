"""What responses say of single tokens does not depend on how many come at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from serving import Live, events_of, serving

import ggufspec
from ggufspec.engine.engine import Engine

TURN: list[Any] = [{"role": "user", "content": "hello"}]
THINKING = "{# <think> </think> #}" + tiny.CHATML.replace(
    "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
)
REASONING, ANSWER = "So I say\n", "Yes, é."
TEXT = f"{REASONING}</think>\n\n{ANSWER}"
WIDE = "é日本ok"


@pytest.fixture(scope="module")
def thinker(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Reasons before it answers TURN."""
    path: Path = tmp_path_factory.mktemp("models") / "thinker.gguf"
    script = [*tiny.BPE.spell(TEXT), tiny.BPE.id_of("<|im_end|>")]
    n_prompt = len(chat_pair.render(TURN, THINKING))
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 512}
    tiny.write_timed(path, script, chat_template=THINKING, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Writes characters of several tokens."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    tiny.write_timed(path, tiny.SPM.spell(WIDE), n_prompt=2)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as live:
        yield live


@pytest.mark.parametrize("n_draft", [0, 1, 3, 8])
@pytest.mark.parametrize("stop", [None, "\n\nUser"])
def test_reasoning_has_one_number_of_tokens(thinker: Live, n_draft: int, stop: str | None) -> None:
    drafted = {"type": "content", "content": TEXT}
    asked = {"temperature": 0, "draft_n": n_draft, "prediction": drafted, "stop": stop}
    wanted = len(tiny.BPE.spell(REASONING.rstrip()))
    chat = thinker.ok("/v1/chat/completions", messages=TURN, **asked)
    assert chat["choices"][0]["message"]["content"] == ANSWER
    assert (chat["timings"]["draft_n_accepted"] > 0) == (n_draft > 0)
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == wanted
    logprobs = {"include": ["message.output_text.logprobs"], **asked}
    items = thinker.ok("/v1/responses", input=TURN, **logprobs)
    assert items["usage"]["output_tokens_details"]["reasoning_tokens"] == wanted
    tokens = items["output"][1]["content"][0]["logprobs"]
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode() == ANSWER


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
