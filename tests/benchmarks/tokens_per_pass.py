"""Measures tokens per target pass, by verification rule, temperature and draft length.

    python -m tests.benchmarks.tokens_per_pass [TARGET DRAFT] [--prompts FILE] [--chat]

Counts only, so a busy machine does not matter. No truncation; end-of-text tokens are ignored.
`match, argmax` is what llama.cpp's programs do: draft the likeliest token, sample, compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from ggufspec.audit import PROMPTS
from ggufspec.common.prompts import TEXTS, parse_prompts
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.options import GenerateOptions
from ggufspec.standin.embedded import embedded_draft, embedded_target

VARIANTS: dict[str, GenerateOptions] = {
    "plain": {"drafter": "none"},
    "match, argmax": {"verify": "match", "draft_temperature": 0.0},
    "rejection, as target": {"verify": "rejection"},
    "rejection, auto": {"verify": "rejection"},
    "traversal, as target": {"verify": "traversal"},
    "traversal, auto": {"verify": "traversal"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: tokens per pass, with the standard error over texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.benchmarks.tokens_per_pass"
    )
    parser.add_argument("target", nargs="?", default=embedded_target())
    parser.add_argument("draft", nargs="?", default=embedded_draft())
    parser.add_argument("--prompts", type=Path, help="as for ggufspec audit")
    parser.add_argument("--chat", action="store_true", help="with the target's chat template")
    parser.add_argument("--temp", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--draft-n", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--runs", type=int, default=24, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    texts: Sequence[str] = PROMPTS
    if options.prompts:
        found = parse_prompts(options.prompts.read_bytes(), str(options.prompts), TEXTS)
        texts = [prompt.turns[0] for prompt in found]
    sys.stdout.write(
        f"{'temperature':>11}{'drafted':>9}" + "".join(f"{name:>22}" for name in VARIANTS)
    )
    sys.stdout.write("\n")
    with load(
        options.target,
        options.draft,
        n_draft_max=max(options.draft_n),
        n_threads=options.threads,
    ) as engine:
        prompts: Sequence[str | Sequence[int]] = texts
        if options.chat:
            prompts = [engine.render([{"role": "user", "content": text}]) for text in texts]
        for temperature in options.temp:
            for n_draft in options.draft_n:
                sys.stdout.write(f"{temperature:>11.2f}{n_draft:>9}")
                for name, variant in VARIANTS.items():
                    settings: GenerateOptions = {
                        **variant,
                        "temperature": temperature,
                        "n_draft": n_draft,
                        "max_tokens": options.tokens,
                    }
                    if "as target" in name:
                        settings["draft_temperature"] = temperature
                    lengths = measure(engine, prompts, options.runs, settings)
                    cell = f"{fmean(lengths):.2f} +- {stdev(lengths) / len(lengths) ** 0.5:.2f}"
                    sys.stdout.write(f"{cell:>22}")
                    sys.stdout.flush()
                sys.stdout.write("\n")


def measure(
    engine: Engine, prompts: Sequence[str | Sequence[int]], n_runs: int, settings: GenerateOptions
) -> list[float]:
    """Tokens per pass of each text."""
    lengths = []
    for run in range(n_runs):
        options: GenerateOptions = {
            **settings,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "ignore_eos": True,
            "seed": run,
        }
        lengths.append(engine.generate(prompts[run % len(prompts)], **options).stats.mean_length)
    return lengths


if __name__ == "__main__":
    main()
