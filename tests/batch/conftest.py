"""Tiny models, and batches of them over real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.batch.pool import LocalProcess
from ggufspec.batch.results import FileResults
from ggufspec.batch.run import Batch, News, Plan, Start
from ggufspec.common.prompts import Prompt

SETTINGS = {"max_tokens": 24, "n_draft": 2, "drafter": None, "temperature": 0.8}


@dataclass
class Setting:
    """A pair and a folder; `run` makes a batch of it."""

    target: Path
    draft: Path
    folder: Path
    news: list[News] = field(default_factory=list)

    def run(
        self,
        prompts: Sequence[Prompt],
        name: str = "r",
        *,
        heard: Callable[[News], None] | None = None,
        settings: dict[str, Any] | None = None,
        load: dict[str, Any] | None = None,
        start: Start = LocalProcess,
        **plan: Any,
    ) -> list[dict[str, Any]]:
        """The records, in the order of the prompts."""
        made = Plan(
            **{
                "target": str(self.target),
                "draft": str(self.draft),
                "settings": {**SETTINGS, **(settings or {})},
                "load": {"n_threads": 1, **(load or {})},
                **plan,
            }
        )
        results = FileResults(self.folder / f"{name}.jsonl", {"name": name}, len(prompts))
        try:

            def hear(news: News) -> None:
                self.news.append(news)
                if heard is not None:
                    heard(news)

            assert Batch(prompts, made, results, hear, start).run()
        finally:
            results.close()
        return [results.records[prompt.index] for prompt in prompts]

    def told(self, what: str) -> list[News]:
        return [news for news in self.news if news.what == what]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.write_llama(folder / "target.gguf", n_ctx_train=4096, chat_template=tiny.CHATML)
    return target, tiny.write_llama(folder / "draft.gguf", n_layer=1, n_ctx_train=4096)


@pytest.fixture
def batch(pair: tuple[Path, Path], tmp_path: Path) -> Setting:
    return Setting(*pair, tmp_path)


def texts(n: int) -> list[Prompt]:
    return [Prompt(i, "prompt", turns=("hello " * (i % 3 + 1),)) for i in range(n)]


def killing(*indices: int, n_times: int = 1000) -> Callable[[News], None]:
    """From outside, kills whoever begins one of these prompts."""
    left = dict.fromkeys(indices, n_times)

    def hear(news: News) -> None:
        if news.what == "begun" and news.index is not None and left.get(news.index, 0) > 0:
            left[news.index] -= 1
            os.kill(news.pid, signal.SIGKILL)

    return hear


def together(n_workers: int) -> Callable[[News], None]:
    """Nobody writes before so many are ready: so all of them will write something."""
    held: list[int] = []
    ready: list[int] = []

    def hear(news: News) -> None:
        if news.what == "ready":
            ready.append(news.pid)
        if news.what == "begun" and len(ready) < n_workers:
            held.append(news.pid)
            os.kill(news.pid, signal.SIGSTOP)
        elif len(ready) == n_workers:
            while held:
                os.kill(held.pop(), signal.SIGCONT)

    return hear
