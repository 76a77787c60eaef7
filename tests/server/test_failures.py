"""Failures of our own: one request fails, the others are served, and /health is accurate."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from serving import comes_true, serving, written

import ggufspec
from ggufspec.decoding.stats import Stats
from ggufspec.engine import logprobs
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.handle import Handle
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.passes import Passes
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.scheduler import Scheduler
from ggufspec.llama.session import LlamaSession
from ggufspec.server import texts
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ChoiceFinished, ParsedRequest
from ggufspec.server.metrics import Metrics

SHORT: dict[str, Any] = {"prompt": "hi", "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize(("name", "stream"), [("end", True), ("completion", False)])
def test_the_engine_survives_a_request_that_cannot_be_ended(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, name: str, stream: bool
) -> None:
    def fails(generation: Generation) -> None:
        raise ZeroDivisionError("a secret prompt in /a/path")

    broken = fails if name == "end" else property(fails)
    with serving(endless) as live:
        with monkeypatch.context() as patch:
            patch.setattr(Generation, name, broken)
            response = live.post("/v1/completions", **SHORT, stream=stream)
        assert response.status_code == (200 if stream else 500)
        assert "secret" not in response.text
        assert '"code":"failed"' in response.text.replace(" ", "")
        assert live.client.get("/health").json() == {"status": "ok"}
        assert live.ok("/v1/completions", **SHORT)["choices"][0]["text"] == "abcd"
        assert live.is_free()


def test_the_engine_survives_a_client_that_cannot_be_notified(endless: Engine) -> None:
    def fails(handle: Handle) -> None:
        raise ZeroDivisionError

    with serving(endless) as live:
        options = CheckedOptions.of({"temperature": 0, "max_tokens": 4})
        endless.scheduler.submit(Handle(endless.prepare("hi", options), on_news=fails))
        assert live.ok("/v1/completions", **SHORT)["choices"][0]["text"] == "abcd"
        assert live.is_free()
        assert live.client.get("/health").json() == {"status": "ok"}


def test_health_reports_an_engine_that_has_failed(
    endless_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_the_thread(*args: object) -> None:
        raise SystemExit

    with (
        ggufspec.load(endless_file, n_threads=1, n_ctx=400, tuned=False) as engine,
        serving(engine) as live,
    ):
        assert live.client.get("/health").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_round", ends_the_thread)
            response = live.client.post("/v1/completions", json=SHORT, timeout=PATIENCE)
        assert response.status_code == 500
        assert comes_true(lambda: live.client.get("/health").status_code == 503)
        assert live.client.get("/health").json() == {"status": "failed"}
        refused = live.post("/v1/completions", **SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_failed"


def test_health_reports_a_round_that_does_not_end(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def hangs(*args: object) -> list[object]:
        ends.wait(PATIENCE)
        return []

    monkeypatch.setattr(texts, "ROUND_SECONDS_MAX", 0.05)
    with serving(endless) as live, ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patch:
            patch.setattr(Passes, "run", hangs)
            asked = threads.submit(live.ok, "/v1/completions", **SHORT)
            assert comes_true(lambda: live.client.get("/health").status_code == 503)
            assert live.client.get("/health").json() == {"status": "stalled"}
        ends.set()
        assert asked.result()["choices"][0]["text"] == "abcd"
        # A real round may take longer than 0.05 s here.
        assert comes_true(lambda: live.client.get("/health").json() == {"status": "ok"})


class Panic(BaseException):
    """As of native code: no Exception."""


@pytest.fixture(scope="module")
def two_slots(endless_file: Path) -> Iterator[Engine]:
    with ggufspec.load(endless_file, n_threads=1, n_ctx=400, n_slots=2, tuned=False) as engine:
        yield engine


STEPS: dict[str, tuple[Any, str]] = {
    "construction": (Generation, "__init__"),
    "prompt": (LlamaSession, "unread"),
    "ask": (Generation, "ask"),
    "preparation": (LlamaSession, "prepare"),
    "answer": (Generation, "answer"),
    "log-probabilities": (logprobs, "logprobs_of"),
    "metrics": (Metrics, "observe"),
    "end": (Generation, "end"),
}
SEED = 13  # of the request that fails
N_PROMPT = 5  # its tokens
N_TOP = 19  # log-probabilities that it asks for


def is_bad(given: object) -> bool:
    if isinstance(given, PreparedText):
        return given.seed == SEED
    if isinstance(given, Generation) and "_prepared" in vars(given):
        return vars(given)["_prepared"].seed == SEED
    if isinstance(given, Stats):
        return given.n_prompt == N_PROMPT
    if isinstance(given, int):
        return given == N_TOP
    return isinstance(given, Sequence | array) and list(given[: N_PROMPT - 1]) == BAD[1:]


BAD = [300] * N_PROMPT


@pytest.mark.parametrize("step", STEPS)
def test_an_error_in_any_step_fails_that_request_alone(
    two_slots: Engine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    owner, name = STEPS[step]
    works = getattr(owner, name)

    def fails(*args: Any, **options: Any) -> Any:
        if any(map(is_bad, args)):
            raise Panic
        return works(*args, **options)

    answered: dict[bool, list[ChoiceEvent]] = {True: [], False: []}
    served = texts.Texts(two_slots, n_waiting_max=8, metrics=Metrics())

    def ask(bad: bool) -> ParsedRequest:
        prompt = BAD if bad else two_slots.tokenize("hi")
        options = CheckedOptions.of({"temperature": 0, "max_tokens": 8})
        return ParsedRequest([prompt], options, seed=SEED if bad else 1, n_top=N_TOP if bad else 0)

    async def both() -> list[ApiError | None]:
        return await asyncio.gather(*(written(served, ask(bad), answered[bad]) for bad in answered))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        error, no_error = asyncio.run(both())
    assert served.status == "ok"
    assert error is not None
    assert error.status_code == 500
    assert no_error is None
    *_, finished = answered[False]
    assert isinstance(finished, ChoiceFinished)
    assert finished.completion.text == "abcdefgh"


def test_logits_that_are_no_numbers_fail_that_request_alone(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(endless) as live:
        with monkeypatch.context() as patch:
            patch.setattr(
                LlamaSession, "score", lambda *_: np.full((1, endless.vocab.n_tokens), np.nan, "f4")
            )
            for temperature in (0, 1):
                response = live.post("/v1/completions", **{**SHORT, "temperature": temperature})
                assert response.status_code == 500
                assert "cannot be sampled" in response.json()["error"]["message"]
        assert live.ok("/v1/completions", **SHORT)["choices"][0]["text"] == "abcd"
