"""Failures of our own: one request fails, the others are served, and /health is accurate."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE
from serving import comes_true, serving

import ggufspec
from ggufspec.decoding.stats import Stats
from ggufspec.engine import logprobs
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scheduler import Scheduler
from ggufspec.llama.session import LlamaSession
from ggufspec.server import worker
from ggufspec.server.events import ParsedRequest, RequestEvent
from ggufspec.server.metrics import Metrics

SHORT: dict[str, Any] = {"prompt": "hi", "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize(("name", "stream"), [("close", True), ("completion", False)])
def test_the_worker_survives_a_request_that_cannot_be_ended(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, name: str, stream: bool
) -> None:
    def fails(generation: Generation) -> None:
        raise ZeroDivisionError("a secret prompt in /a/path")

    broken = fails if name == "close" else property(fails)
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


def test_the_worker_survives_a_client_that_cannot_be_notified(endless: Engine) -> None:
    def fails(event: RequestEvent) -> None:
        raise ZeroDivisionError

    with serving(endless) as live:
        request = ParsedRequest(
            [endless.tokenize("hi")], CheckedOptions.of({"temperature": 0, "max_tokens": 4})
        )
        live.service.worker.submit(request, fails)
        assert live.ok("/v1/completions", **SHORT)["choices"][0]["text"] == "abcd"
        assert live.is_free()
        assert live.client.get("/health").json() == {"status": "ok"}


def test_health_reports_a_worker_that_has_died(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_the_thread(*args: object) -> None:
        raise SystemExit

    with serving(endless) as live:
        assert live.client.get("/health").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "step", ends_the_thread)
            response = live.client.post("/v1/completions", json=SHORT, timeout=PATIENCE)
        assert response.status_code == 500
        assert comes_true(lambda: live.client.get("/health").status_code == 503)
        assert live.client.get("/health").json() == {"status": "failed"}
        refused = live.post("/v1/completions", **SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "worker_failed"


def test_health_reports_a_round_that_does_not_end(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def hangs(*args: object) -> list[object]:
        ends.wait(PATIENCE)
        return []

    monkeypatch.setattr(worker, "ROUND_SECONDS_MAX", 0.05)
    with serving(endless) as live, ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "step", hangs)
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
    if isinstance(given, Generation):
        return vars(given).get("seed") == SEED
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
        if options.get("seed") == SEED or any(map(is_bad, args)):
            raise Panic
        return works(*args, **options)

    answered: dict[bool, list[RequestEvent]] = {True: [], False: []}
    ran = worker.EngineWorker(two_slots, n_waiting_max=8, metrics=Metrics())
    for bad, events in answered.items():
        prompt = BAD if bad else two_slots.tokenize("hi")
        options = CheckedOptions.of({"temperature": 0, "max_tokens": 8})
        seed = SEED if bad else 1
        n_top = N_TOP if bad else 0
        ran.submit(ParsedRequest([prompt], options, seed=seed, n_top=n_top), events.append)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        ran.start()
        assert comes_true(lambda: not ran.n_running and not ran.n_waiting)
    assert ran.status == "ok"
    end = answered[True][-1]
    assert isinstance(end, worker.RequestEnded)
    assert end.error is not None
    assert end.error.status_code == 500
    *_, finished, end = answered[False]
    assert end == worker.RequestEnded(None)
    assert isinstance(finished, worker.ChoiceFinished)
    assert finished.completion.text == "abcdefgh"
    ran.finish()
    assert ran.join(PATIENCE)


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
