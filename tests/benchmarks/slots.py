"""Compares shared passes over several texts with one text after the other, in one process.

    python -m tests.benchmarks.slots --target large.gguf --draft small.gguf --at-once 1,2,4,8

Each turn generates texts for the same prompts with each number of --at-once, with drafts and
without, each prompt processed again. Reports tokens/s of wall time, with prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter

from ggufspec.bench.experiment import KINDS, rotated
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.options import GenerateOptions

_DRAFTERS = (None, "none")


def speed(
    engine: Engine, prompts: Sequence[str], n_at_once: int, options: GenerateOptions
) -> float:
    """Tokens/s over all prompts, `n_at_once` of them at a time."""
    engine.forget()
    start, n_tokens = perf_counter(), 0
    for first in range(0, len(prompts), n_at_once):
        texts = engine.generate_batch(prompts[first : first + n_at_once], **options)
        n_tokens += sum(text.stats.n_generated for text in texts)
    return n_tokens / (perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Medians, and ratios to one text after the other, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.slots")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--at-once", default="1,2,4,8", help="numbers of texts, beginning with 1")
    parser.add_argument("--n-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    numbers = [int(part) for part in options.at_once.split(",")]
    if numbers[0] != 1 or min(numbers) < 1:
        parser.error("--at-once must start with 1, the base of the ratios")

    texts = [text for kind in KINDS.values() for text in kind]
    prompts = [texts[i % len(texts)] for i in range(options.n_prompts)]
    variants = [(drafter, n) for drafter in _DRAFTERS for n in numbers]
    found: dict[tuple[str | None, int], list[float]] = {variant: [] for variant in variants}
    n_ctx = max(map(len, prompts)) + options.tokens + 1  # a token has a character at least
    with load(options.target, options.draft, n_ctx=n_ctx, n_slots=max(numbers)) as engine:
        for turn in range(-1, options.runs):  # the first warms up
            for drafter, n in rotated(variants, turn + 1):
                given: GenerateOptions = {
                    "drafter": drafter,
                    "temperature": options.temp,
                    "max_tokens": options.tokens,
                    "ignore_eos": True,
                }
                tokens_per_second = speed(engine, prompts, n, given)
                if turn >= 0:
                    found[drafter, n].append(tokens_per_second)
    sys.stdout.write("at once          tokens/s   over one after the other\n")
    for drafter, n in variants:
        ratios = sorted(
            mine / one for mine, one in zip(found[drafter, n], found[drafter, 1], strict=True)
        )
        name = f"{n}, drafts" if drafter is None else f"{n}, plain"
        sys.stdout.write(
            f"{name:14} {median(found[drafter, n]):10.1f}   {median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})\n"
        )


if __name__ == "__main__":
    main()
