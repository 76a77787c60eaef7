"""A tiny pair, and batches of it in real worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.batch.results import FileResults
from ggufspec.batch.run import (
    GRACE_SECONDS,
    Batch,
    BatchEvent,
    BatchPlan,
    LocalProcess,
    StartWorker,
)
from ggufspec.common.prompts import Prompt

# Without "off", each test would measure which attention is faster.
LOAD: dict[str, Any] = {"n_threads": 1, "flash_attention": "off"}
SETTINGS = {"max_tokens": 24, "n_draft": 2, "drafter": None, "temperature": 0.8}


@dataclass
class BatchSetup:
    """A pair and a folder; `run` runs a batch there."""

    target: Path
    draft: Path
    folder: Path
    events: list[BatchEvent] = field(default_factory=list)

    def run(
        self,
        prompts: Sequence[Prompt],
        name: str = "r",
        *,
        report: Callable[[BatchEvent], None] | None = None,
        settings: dict[str, Any] | None = None,
        load: dict[str, Any] | None = None,
        start: StartWorker = LocalProcess,
        grace: float = GRACE_SECONDS,
        **plan: Any,
    ) -> list[dict[str, Any]]:
        """The records, in the order of the prompts."""
        made = BatchPlan(
            **{
                "target": str(self.target),
                "draft": str(self.draft),
                "settings": {**SETTINGS, **(settings or {})},
                "load": {**LOAD, **(load or {})},
                **plan,
            }
        )
        results = FileResults(self.folder / f"{name}.jsonl", {"name": name}, len(prompts))
        try:

            def keep(event: BatchEvent) -> None:
                self.events.append(event)
                if report is not None:
                    report(event)

            assert Batch(prompts, made, results, keep, start, grace).run()
        finally:
            results.close()
        return [results.records[prompt.index] for prompt in prompts]

    def events_of(self, what: str) -> list[BatchEvent]:
        return [event for event in self.events if event.what == what]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.write_llama(folder / "target.gguf", n_ctx_train=4096, chat_template=tiny.CHATML)
    return target, tiny.write_llama(folder / "draft.gguf", n_layer=1, n_ctx_train=4096)


@pytest.fixture
def batch(pair: tuple[Path, Path], tmp_path: Path) -> BatchSetup:
    return BatchSetup(*pair, tmp_path)


def texts(n: int) -> list[Prompt]:
    return [Prompt(i, "prompt", turns=("hello " * (i % 3 + 1),)) for i in range(n)]


def killing(*indices: int, n_times: int = 1000) -> Callable[[BatchEvent], None]:
    """Kills the process of a worker that begins one of these prompts."""
    left = dict.fromkeys(indices, n_times)

    def report(event: BatchEvent) -> None:
        if event.what == "begun" and event.index is not None and left.get(event.index, 0) > 0:
            left[event.index] -= 1
            os.kill(event.pid, signal.SIGKILL)

    return report


def together(n_workers: int) -> Callable[[BatchEvent], None]:
    """Stops workers until `n_workers` are ready, so that each of them gets a prompt."""
    held: list[int] = []
    ready: list[int] = []

    def report(event: BatchEvent) -> None:
        if event.what == "ready":
            ready.append(event.pid)
        if event.what == "begun" and len(ready) < n_workers:
            held.append(event.pid)
            os.kill(event.pid, signal.SIGSTOP)
        elif len(ready) == n_workers:
            while held:
                os.kill(held.pop(), signal.SIGCONT)

    return report
