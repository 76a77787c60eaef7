"""Measures the first text of a pair without stored profiles: each text in a new process.

    python -m tests.benchmarks.cold_start TARGET DRAFT CONTENDER   (one text; JSON)

`tests.benchmarks.auto --cold-start` runs it repeatedly, each time with an empty cache folder. Two
speeds: of generation, and of the whole call, which includes prompt processing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from ggufspec.bench.prompts import KINDS
from ggufspec.common.files import CACHE_VARIABLE
from ggufspec.engine.load import load
from ggufspec.errors import OptionError
from tests.benchmarks import contender_options
from tests.benchmarks.ab_report import MedianRange, geometric_mean

NEEDED = 1 / 1.05  # not slower than plain by more than 5 %
SPEEDS = {"generation": "tokens_per_second", "whole call": "tokens_per_call_second"}


class ColdStartText(NamedTuple):
    """One text in a new process."""

    condition: str
    turn: int
    contender: str
    tokens_per_second: float
    tokens_per_call_second: float
    load_seconds: float


def measure(
    pairs: Sequence[tuple[Path, Path]],
    samplings: Sequence[str],
    kinds: Sequence[str],
    contenders: Sequence[str],
    *,
    n_tokens: int,
    n_runs: int,
) -> Iterator[ColdStartText]:
    """Contenders in alternation, in each condition; a first turn is a warm-up."""
    for target, draft in pairs:
        for sampling in samplings:
            for kind in kinds:
                condition = f"{target.stem} ({draft.stem}), {sampling}, {kind}"
                for turn in range(-1, n_runs):
                    step = turn % len(contenders)
                    for contender in [*contenders[step:], *contenders[:step]]:
                        found = _in_a_new_process(
                            *(str(target), str(draft), contender),
                            *("--sampling", sampling, "--tokens", str(n_tokens)),
                            *("--prompts", kind, "--turn", str(max(turn, 0))),
                        )
                        if turn >= 0:
                            yield ColdStartText(
                                condition=condition, turn=turn, contender=contender, **found
                            )


def render(texts: Sequence[ColdStartText], base: str = contender_options.PLAIN) -> str:
    """Ratios to plain of the same turn by condition; whether the worst reaches the threshold."""
    lines: list[str] = []
    medians: dict[str, list[float]] = {}
    by_condition: dict[tuple[str, str], dict[int, ColdStartText]] = {}
    for first in texts:
        by_condition.setdefault((first.condition, first.contender), {})[first.turn] = first
    for (condition, contender), turns in by_condition.items():
        others = by_condition.get((condition, base), {})
        if contender == base:
            continue
        for name, field in SPEEDS.items():
            pairs = [(turn, others[n]) for n, turn in turns.items() if n in others]
            found_range = MedianRange.of([getattr(a, field) / getattr(b, field) for a, b in pairs])
            if found_range:
                medians.setdefault(f"{contender} / {base}, {name}", []).append(found_range.median)
                lines.append(
                    f"{condition}: {contender} / {base}, {name}: {found_range.median:.3f} "
                    f"({found_range.low:.3f}-{found_range.high:.3f}), {found_range.n} turns"
                )
    for name, values in medians.items():
        holds = "holds" if min(values) >= NEEDED else "FAILS"
        lines.append(
            f"{holds:5}  {min(values):.3f} (needed {NEEDED:.2f})  worst condition of {name}; "
            f"geometric mean {geometric_mean(values):.3f}"
        )
    return "\n".join(lines) + "\n"


def _in_a_new_process(*arguments: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ggufspec-first-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.cold_start", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, CACHE_VARIABLE: folder},
        )
    if done.returncode:
        raise OptionError(
            f"the process of one text failed with exit code {done.returncode}; "
            f"its stderr ends with:\n{done.stderr[-800:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one text and print how long it took, as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.benchmarks.cold_start"
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("contender", help="plain, auto, 'fixed 3' ...")
    parser.add_argument("--sampling", default="0", help="a temperature, or default")
    parser.add_argument("--prompts", default="open", choices=sorted(KINDS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turn", type=int, default=0, help="chooses the prompt, and the seed")
    options = parser.parse_args(arguments)
    prompts = KINDS[options.prompts]
    started_at = perf_counter()
    with load(options.target, options.draft) as engine:
        loaded_at = perf_counter()
        stats = contender_options.write(
            engine,
            options.contender,
            prompts[options.turn % len(prompts)],
            sampling=options.sampling,
            n_tokens=options.tokens,
            seed=options.turn,
        )
        seconds = perf_counter() - loaded_at
    found = {
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_call_second": stats.n_generated / seconds,
        "load_seconds": loaded_at - started_at,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
