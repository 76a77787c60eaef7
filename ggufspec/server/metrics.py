"""The metrics of one server, for Prometheus."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ggufspec.decoding.stats import Stats, Threads, threads_since

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
        self.n_waiting = gauge("queue_waiting", "Requests for text that wait for a slot.")
        self.n_running = gauge("queue_running", "Requests for text that are being processed.")
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
        self._plain_seconds = self._speculative_seconds = 0.0
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds",
            "From the arrival of a request to its first text.",
            namespace="ggufspec",
            registry=self.registry,
            buckets=_BUCKETS,
        )

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
