"""Failures of our own: one request fails, the others are served, and /health is accurate."""

from __future__ import annotations

from typing import Any

import pytest
from serving import comes_true, serving

from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scheduler import Scheduler
from ggufspec.server.worker import ParsedRequest, RequestEvent

SHORT: dict[str, Any] = {"prompt": "hi", "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize("name", ["close", "completion"])
@pytest.mark.parametrize("stream", [False, True])
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
            response = live.client.post("/v1/completions", json=SHORT, timeout=3)
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
        ends.wait(10)
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
        assert live.client.get("/health").json() == {"status": "ok"}


class Panic(BaseException):
    """As of native code: no Exception."""


STEPS: dict[str, tuple[type, str]] = {
    "construction": (Generation, "__init__"),
    "prompt": (Generation, "read"),
    "ask": (Generation, "ask"),
    "answer": (Generation, "answer"),
    "pass": (Scheduler, "_scored"),
    "log-probabilities": (worker.EngineWorker, "_logprobs"),
    "metrics": (Metrics, "observe"),
}


@pytest.mark.parametrize("error", [MemoryError, RecursionError, Panic])
@pytest.mark.parametrize("step", STEPS)
def test_an_error_in_any_step_fails_that_request_alone(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    ...
