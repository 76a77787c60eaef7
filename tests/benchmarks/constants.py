"""The effect of each tuned number of drafting: seconds of recorded texts with half and twice of it.

    python -m tests.benchmarks.constants [NAME ...]

Seconds are means over the costs of `tests.benchmarks.replay`, over those with the number's value.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import geometric_mean

from ggufspec.drafting import constants
from tests.benchmarks import replay

_N_SEEDS = 2  # orders of the texts


def main(names: Sequence[str]) -> None:
    """Print a line for each constant: seconds over those with its value."""
    texts = replay.load()
    base = seconds(texts)
    sys.stdout.write(f"{'constant':28} {'halved':>8} {'doubled':>8}\n")
    for name in names or [name for name in vars(constants) if _is_number(name)]:
        row = []
        for factor in (0.5, 2.0):
            with changed(name, factor):
                row.append(seconds(texts) / base)
        sys.stdout.write(f"{name:28} {row[0]:8.3f} {row[1]:8.3f}\n")
        sys.stdout.flush()


def seconds(texts: Sequence[replay.Text]) -> float:
    """The geometric mean of a text's seconds over those of plain decoding."""
    found = []
    for costs in replay.COSTS.values():
        for seed in range(_N_SEEDS):
            contender, rng = replay.Auto(), random.Random(seed)
            for text in random.Random(seed).sample(list(texts), len(texts)):
                found.append(contender(text, costs, rng) / (len(text) * costs.curve[0]))
    return geometric_mean(found)


def _is_number(name: str) -> bool:
    unused = name.startswith(("FORCED", "ADVICE", "N_ADVICE"))
    return name.isupper() and not unused and isinstance(vars(constants)[name], (int, float))


@contextmanager
def changed(name: str, factor: float) -> Iterator[None]:
    """The constant times `factor`; shares stay below 1, counts stay whole and positive."""
    before = vars(constants)[name]
    after = before * factor
    if isinstance(before, int):
        after = max(round(after), 1)
    elif name.startswith("MIN_DISCOUNT"):
        after = 1 - (1 - before) * factor
    setattr(constants, name, after)
    try:
        yield
    finally:
        setattr(constants, name, before)


if __name__ == "__main__":
    main(sys.argv[1:])
