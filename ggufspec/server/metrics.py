"""What the server has done so far, as Prometheus reads it. Counts and seconds; no requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from threading import Lock

from ggufspec.decoding.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds

_EACH = "; texts at the same time add up."


class Metrics:
    """Counters that one thread adds to and another reads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tasks: Counter[str] = Counter()
        self._first_text = [0] * (len(_BOUNDS) + 1)
        self._first_text_seconds = 0.0
        self._n_prompt = self._n_reused = self._n_generated = 0
        self._drafted: Counter[int] = Counter()  # by position
        self._accepted: Counter[int] = Counter()
        self._prompt_seconds = self._seconds = 0.0
        self._plain_seconds = self._compared_seconds = 0.0
        self._task_seconds = 0.0

    def answered(self, path: str, status: int) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[path, status] += 1

    def ended(self, how: str, seconds: float) -> None:
        """The worker is done with a task: "done", "cancelled" or "failed"."""
        with self._lock:
            self._tasks[how] += 1
            self._task_seconds += seconds

    def first_text(self, seconds: float) -> None:
        """So long after it was asked for, the first text came."""
        with self._lock:
            self._first_text[bisect_left(_BOUNDS, seconds)] += 1
            self._first_text_seconds += seconds

    def wrote(self, stats: Stats, plain_seconds: float | None) -> None:
        """A text has ended. `plain_seconds`: what a token costs without drafts, where known."""
        with self._lock:
            self._n_prompt += stats.n_prompt
            self._n_reused += stats.n_prompt_reused
            self._n_generated += stats.n_generated
            self._drafted.update(dict(enumerate(stats.drafted_by_position)))
            self._accepted.update(dict(enumerate(stats.accepted_by_position)))
            self._prompt_seconds += stats.seconds.prompt
            self._seconds += stats.seconds.generation
            if plain_seconds and stats.n_drafted:
                self._plain_seconds += plain_seconds * stats.n_generated
                self._compared_seconds += stats.seconds.own

    @property
    def mean_task_seconds(self) -> float:
        """What a task took so far, on average; 1 where there was none."""
        with self._lock:
            n_tasks = sum(self._tasks.values())
            return self._task_seconds / n_tasks if n_tasks else 1.0

    def text(self, *, n_waiting: int, n_running: int) -> str:
        """All of it, in Prometheus's text format."""
        with self._lock:
            return "\n".join(self._lines(n_waiting, n_running)) + "\n"

    def _lines(self, n_waiting: int, n_running: int) -> Iterator[str]:
        yield from _head("requests_total", "counter", "HTTP requests, by path and status.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'ggufspec_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from _head("tasks_total", "counter", "Tasks of the worker, by how they ended.")
        for how in ("done", "cancelled", "failed"):
            yield f'ggufspec_tasks_total{{end="{how}"}} {self._tasks[how]}'
        for name, kind, value, what in (
            ("queue_waiting", "gauge", n_waiting, "Requests that wait for their turn."),
            ("queue_running", "gauge", n_running, "Requests that are being worked on."),
            ("prompt_tokens_total", "counter", self._n_prompt, "Tokens of prompts."),
            ("prompt_tokens_reused_total", "counter", self._n_reused, "Of these, known already."),
            (
                "prompt_seconds_total",
                "counter",
                self._prompt_seconds,
                f"Spent reading prompts{_EACH}",
            ),
            ("generated_tokens_total", "counter", self._n_generated, "Tokens written."),
            ("generation_seconds_total", "counter", self._seconds, f"Spent writing them{_EACH}"),
        ):
            yield from _head(name, kind, what)
            yield (
                f"ggufspec_{name} {value:g}"
                if isinstance(value, float)
                else (f"ggufspec_{name} {value}")
            )
        for name, counts, what in (
            ("drafted_tokens_total", self._drafted, "Drafted tokens, by place in the draft."),
            ("accepted_tokens_total", self._accepted, "Accepted tokens, by place in the draft."),
        ):
            yield from _head(name, "counter", what)
            for position, count in sorted(counts.items()):
                yield f'ggufspec_{name}{{position="{position}"}} {count}'
        if self._compared_seconds:
            yield from _head(
                "speedup_estimate", "gauge", "Measured cost of plain decoding over what was spent."
            )
            yield f"ggufspec_speedup_estimate {self._plain_seconds / self._compared_seconds:.4f}"
        yield from self._histogram()

    def _histogram(self) -> Iterator[str]:
        name = "ggufspec_time_to_first_token_seconds"
        yield from _head("time_to_first_token_seconds", "histogram", "From request to first text.")
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._first_text, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._first_text_seconds:.6f}"
        yield f"{name}_count {total}"


def _head(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP ggufspec_{name} {what}"
    yield f"# TYPE ggufspec_{name} {kind}"
