"""Several requests at the same time: each is answered as if it were alone, and fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import held
from serving import Live, comes_true, events_of, said, serving

import ggufspec
from ggufspec.engine.handle import Handle
from ggufspec.engine.options import CheckedOptions

N_SLOTS = 3
ENDLESS: dict[str, Any] = {"prompt": "hi", "temperature": 0, "stream": True}
PROMPTS = ["hello", "world", "the model", "the end", "say", "stop"]


@pytest.fixture(scope="module")
def wide(chat_files: tuple[Path, Path]) -> Iterator[Live]:
    how: dict[str, Any] = {"flash_attention": "off", "type_k": "f32", "type_v": "f32"}
    with (
        ggufspec.load(*chat_files, n_slots=N_SLOTS, n_threads=1, tuned=False, **how) as engine,
        serving(engine, keep_alive=0.1, defaults={"n_draft": 3}) as running,
    ):
        yield running


@pytest.fixture
def busy(endless_file: Path) -> Iterator[Live]:
    """A server of three slots, whose requests never end."""
    with (
        ggufspec.load(
            endless_file, n_slots=N_SLOTS, n_threads=1, n_ctx=5000, tuned=False
        ) as engine,
        serving(engine, n_waiting_max=2, keep_alive=0.05) as running,
    ):
        yield running


def begin(live: Live, stack: ExitStack, **more: Any) -> httpx.Response:
    made = live.client.stream("POST", "/v1/completions", json={**ENDLESS, **more})
    return stack.enter_context(made)


def test_many_at_a_time_are_answered_as_each_alone(wide: Live) -> None:
    alone = {p: wide.engine.generate(p, temperature=0, max_tokens=30).text for p in PROMPTS}
    most: list[int] = []

    def ask(prompt: str) -> tuple[str, str]:
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 30}
        if prompt < "t":
            found = wide.ok("/v1/completions", **body)["choices"][0]["text"]
        else:
            found = said(events_of(wide.post("/v1/completions", **body, stream=True)))
        most.append(wide.service.texts.n_running)
        return prompt, found

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, PROMPTS * 6))
    assert all(text == alone[prompt] for prompt, text in answers)
    assert max(most) > 1, "some of them were written at the same time"


@pytest.mark.parametrize("stream", [False, True])
def test_the_texts_of_a_request_are_those_of_their_seeds(wide: Live, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": ["say", "the end"], "max_tokens": 20, "temperature": 0.9}
    response = wide.post("/v1/completions", **body, n=2, seed=4, stream=stream)
    if stream:
        events = events_of(response)
        found = [said(events, i) for i in range(4)]
    else:
        found = [choice["text"] for choice in response.json()["choices"]]
    alone = [
        wide.ok("/v1/completions", **{**body, "prompt": prompt}, seed=4 + i)["choices"][0]["text"]
        for i, prompt in enumerate(["say", "say", "the end", "the end"])
    ]
    assert found == alone


def test_as_many_run_as_there_are_slots_and_the_next_begins_when_one_leaves(busy: Live) -> None:
    worker = busy.service.texts
    with ExitStack() as rest:
        first = ExitStack()
        begin(busy, first)
        heard = [begin(busy, rest) for _ in range(N_SLOTS - 1)]
        assert comes_true(lambda: worker.n_running == N_SLOTS)
        lines = [response.iter_lines() for response in heard]
        for line in lines:
            next(line)
        begin(busy, rest)
        assert comes_true(lambda: worker.n_waiting == 1)
        assert worker.n_running == N_SLOTS
        first.close()
        assert comes_true(lambda: worker.n_waiting == 0)
        assert comes_true(lambda: worker.n_running == N_SLOTS)
        for line in lines:  # who was there writes on
            assert any(next(line).startswith("data:") for _ in range(10))
    assert busy.is_free()


def test_a_full_queue_sends_retry_after(busy: Live) -> None:
    worker = busy.service.texts
    with ExitStack() as stack:
        for n in range(1, N_SLOTS + 3):
            begin(busy, stack)
            assert comes_true(lambda n=n: worker.n_running + worker.n_waiting == n)
        for stream in (True, False):
            refused = busy.post("/v1/completions", **{**ENDLESS, "stream": stream})
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "queue_full"
        assert busy.metric("queue_running") == N_SLOTS
        assert busy.metric("queue_waiting") == 2
        assert busy.client.get("/health").status_code == 200, "and the rest is answered at once"
    assert busy.is_free()


@pytest.mark.parametrize(
    ("seconds_before", "wanted"),
    [(0.0, ["short", "long", "longer"]), (600.0, ["longer", "short", "long"])],
    ids=["at once", "not for ever"],
)
def test_a_short_prompt_does_not_wait_for_long_ones(
    endless_file: Path, seconds_before: float, wanted: list[str]
) -> None:
    ended: list[str] = []
    how: dict[str, Any] = {"n_slots": N_SLOTS, "n_threads": 1, "n_ctx": 5000, "n_batch": 256}
    with ggufspec.load(endless_file, tuned=False, **how) as engine:
        options = CheckedOptions.of({"max_tokens": 2})
        handles: list[Handle] = []
        for name, n_prompt in (("longer", 4000), ("long", 3000), ("short", 8)):
            other = engine.tokenize(name)[-1:]  # no prompt begins as another does
            text = engine.prepare(other * n_prompt, options)
            if name == "longer":
                text = replace(text, turn=text.turn - seconds_before)
            handles.append(Handle(text, on_news=partial(note_end, name, ended)))
        with held(engine):
            for handle in handles:
                engine.scheduler.submit(handle)
        assert comes_true(lambda: len(ended) == 3, 60)
    assert ended == wanted


def note_end(name: str, ended: list[str], handle: Handle) -> None:
    if handle.has_ended:
        ended.append(name)


def test_a_request_of_many_texts_shares_no_slot_with_the_next(busy: Live) -> None:
    """Two texts in one slot would be read again at each round."""
    with ExitStack() as stack:
        first = ExitStack()
        lines = begin(busy, first, n=8, prompt="hello world" * 9, max_tokens=1500).iter_lines()
        indices: set[int] = set()
        while len(indices) < N_SLOTS:
            line = next(lines)
            if line.startswith("data:"):
                indices.add(json.loads(line[5:])["choices"][0]["index"])
        other = begin(busy, stack, max_tokens=30)
        assert comes_true(lambda: busy.service.texts.n_running == 2)
        others = other.iter_lines()
        assert [next(others) for _ in range(8)] == [": waiting", ""] * 4
        first.close()
        assert any(line.startswith("data: {") for line in others)
    assert busy.is_free()
