"""Statistics of several generations -> what to tell of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ggufspec.decoding.stats import Stats


@dataclass(frozen=True)
class Row:
    """Several generations in one mode; medians over them, the spread from least to most."""

    mode: str  # "plain" or "speculative"
    n_runs: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    accepted: float | None  # share of the drafted tokens; None where nothing was drafted
    mean_length: float
    overhead: float  # share of wall time outside llama_decode


def summarize_runs(mode: str, runs: Sequence[Stats]) -> Row:
    """One row for several runs."""
    rates = [run.tokens_per_second for run in runs]
    n_drafted = sum(run.n_drafted for run in runs)
    return Row(
        mode=mode,
        n_runs=len(runs),
        tokens_per_second=median(rates),
        tokens_per_second_spread=(min(rates), max(rates)),
        accepted=sum(run.n_accepted for run in runs) / n_drafted if n_drafted else None,
        mean_length=sum(run.n_generated for run in runs)
        / max(sum(run.n_rounds for run in runs), 1),
        overhead=median(run.overhead for run in runs),
    )


def speedups(plain: Sequence[Stats], speculative: Sequence[Stats]) -> list[float]:
    """For each pair of neighbouring runs, how many times as fast the speculative one was."""
    return [
        fast.tokens_per_second / slow.tokens_per_second
        for slow, fast in zip(plain, speculative, strict=True)
        if slow.tokens_per_second > 0
    ]
