"""The metrics of one server, for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ggufspec.decoding.stats import Stats, Threads, threads_since

# llama.cpp's names, for the dashboards that have them; each with what a text adds to it.
_OF_LLAMA_CPP: dict[str, Callable[[Stats], float]] = {
    "prompt_tokens": lambda stats: stats.n_prompt - stats.n_prompt_reused,
    "prompt_tokens_cached": lambda stats: stats.n_prompt_reused,
    "prompt_seconds": lambda stats: stats.seconds.prompt,
    "tokens_predicted": lambda stats: stats.n_generated,
    "tokens_predicted_seconds": lambda stats: stats.seconds.generation,
    "n_decode": lambda stats: stats.n_rounds,
    "spec_decode_num_draft_tokens": lambda stats: stats.n_drafted,
    "spec_decode_num_accepted_tokens": lambda stats: stats.n_accepted,
}
_SPEEDS = {
    "prompt_tokens_seconds": ("prompt_tokens", "prompt_seconds"),
    "predicted_tokens_seconds": ("tokens_predicted", "tokens_predicted_seconds"),
}
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Metrics:
    """Counters, gauges and a histogram, in their own registry; thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace="ggufspec", registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, namespace="ggufspec", registry=self.registry)

        self.http_requests = counter("requests", "HTTP requests.", "path", "status")
        self.generations = counter(
            "generations", "Requests for text that have ended, by outcome.", "outcome"
        )
        for outcome in ("completed", "cancelled", "failed"):
            self.generations.labels(outcome)
        self._n_waiting = gauge("queue_waiting", "Requests for text that wait for a slot.")
        self._n_running = gauge("queue_running", "Requests for text that are being processed.")
        self._prompt_tokens = counter(
            "prompt_tokens", "Tokens of prompts that were processed to their end."
        )
        self._reused_tokens = counter(
            "prompt_tokens_reused", "Prompt tokens that were still in the KV cache."
        )
        self._prompt_seconds = counter(
            "prompt_seconds", "Seconds of prompt processing, summed over concurrent texts."
        )
        self._generated_tokens = counter("generated_tokens", "Generated tokens.")
        self._generation_seconds = counter(
            "generation_seconds", "Seconds of generation, summed over concurrent texts."
        )
        self._decode_seconds = counter(
            "decode_seconds",
            "Seconds in llama_decode, by model and number of threads. Fewer threads are used "
            "while other programs use processors.",
            "model",
            "threads",
        )
        self._threads = Threads()
        self._drafted = counter(
            "drafted_tokens",
            "Drafted tokens, by position in the draft; branches: those outside its longest one.",
            "position",
        )
        self._accepted = counter(
            "accepted_tokens", "Accepted draft tokens, by position in the draft.", "position"
        )
        self._speedup = gauge(
            "speedup_estimate",
            "Measured cost of plain decoding / time spent; NaN until both were measured.",
        )
        self._speedup.set(math.nan)
        what = "As in llama.cpp's server."
        self._of_llama_cpp = {
            name: (Counter(f"llamacpp:{name}", what, registry=self.registry), added)
            for name, added in _OF_LLAMA_CPP.items()
        }
        self._sums = dict.fromkeys(_OF_LLAMA_CPP, 0.0)
        self._gauges = {
            name: Gauge(f"llamacpp:{name}", what, registry=self.registry)
            for name in ("requests_processing", "requests_deferred", *_SPEEDS)
        }
        self._plain_seconds = self._speculative_seconds = 0.0
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first text.",
            namespace="ggufspec",
            registry=self.registry,
            buckets=_BUCKETS,
        )

    def observe_queue(self, n_waiting: Callable[[], float], n_running: Callable[[], float]) -> None:
        for gauges, n in (
            ((self._n_waiting, self._gauges["requests_deferred"]), n_waiting),
            ((self._n_running, self._gauges["requests_processing"]), n_running),
        ):
            for gauge in gauges:
                gauge.set_function(n)

    def observe_threads(self, threads: Threads) -> None:
        """Take the seconds in llama_decode of the engine so far."""
        for model, of_all in threads_since(self._threads, threads).items():
            for n_threads, seconds in of_all.items():
                self._decode_seconds.labels(model, n_threads).inc(seconds)
        self._threads = threads

    def observe(self, stats: Stats, plain_seconds: float | None) -> None:
        """Add a text that has ended, after its prompt was processed.

        `plain_seconds`: cost of a token without drafts, if known.
        """
        for name, (counter, added) in self._of_llama_cpp.items():
            counter.inc(added(stats))
            self._sums[name] += added(stats)
        for name, (what, seconds) in _SPEEDS.items():
            if self._sums[seconds]:
                self._gauges[name].set(self._sums[what] / self._sums[seconds])
        self._prompt_tokens.inc(stats.n_prompt)
        self._reused_tokens.inc(stats.n_prompt_reused)
        self._prompt_seconds.inc(stats.seconds.prompt)
        self._generated_tokens.inc(stats.n_generated)
        self._generation_seconds.inc(stats.seconds.generation)
        for by_position, counts in (
            (self._drafted, stats.drafted_by_position),
            (self._accepted, stats.accepted_by_position),
        ):
            for position, count in enumerate(counts):
                by_position.labels(position).inc(count)
        n_beside = stats.n_drafted - sum(stats.drafted_by_position)
        if n_beside:
            self._drafted.labels("branches").inc(n_beside)
        if plain_seconds and stats.n_drafted:
            self._plain_seconds += plain_seconds * stats.n_generated
            self._speculative_seconds += stats.seconds.own
            if self._speculative_seconds:
                self._speedup.set(self._plain_seconds / self._speculative_seconds)
