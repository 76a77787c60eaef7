"""Records -> totals. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Totals:
    """Of a batch, all its runs together. `attempts` beyond the first are `n_retried`."""

    n_prompts: int
    n_failed: int
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    n_retried: int

    @property
    def acceptance(self) -> float:
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def mean_length(self) -> float:
        return self.n_generated / self.n_rounds if self.n_rounds else 0.0


def totals(records: Iterable[Mapping[str, Any]]) -> Totals:
    """Add up records; those that failed count as such."""
    known = list(records)

    def added(name: str) -> int:
        return sum(record.get(name, 0) for record in known)

    return Totals(
        n_prompts=len(known),
        n_failed=sum(record["error"] is not None for record in known),
        n_generated=added("n_generated"),
        n_rounds=added("n_rounds"),
        n_drafted=added("n_drafted"),
        n_accepted=added("n_accepted"),
        n_retried=sum(record.get("attempts", 1) - 1 for record in known),
    )
