"""Measures tokens per target pass: chains and trees of equal size, by verification rule.

    python -m tests.benchmarks.tokens_per_pass [TARGET DRAFT] [--prompts FILE] [--chat]

Counts only, so a busy machine does not matter. No truncation; end-of-text tokens are ignored.
`chain, match` is what llama.cpp's programs do: draft the likeliest token, sample, compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from ggufspec.audit import PROMPTS
from ggufspec.common.prompts import TEXTS, parse_prompts
from ggufspec.decoding.stats import Stats
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.options import GenerateOptions
from ggufspec.standin.embedded import embedded_draft, embedded_target

RULES = ("match", "rejection", "traversal")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: tokens per pass, with the standard error over texts."""
    found = parser(__doc__, "tokens_per_pass")
    found.add_argument("--draft-n", type=int, nargs="+", default=[4, 8, 16])
    found.add_argument("--draft-temp", type=float, help="default: the target's")
    found.add_argument("--rules", nargs="+", choices=RULES, default=RULES, help="default: all")
    options = found.parse_args(arguments)
    variants: dict[str, GenerateOptions] = {
        f"{shape}, {rule}": {"verify": rule, "tree": tree}
        for shape, tree in (("chain", "off"), ("tree", "on"))
        for rule in options.rules
    }
    sys.stdout.write(f"{'temperature':>11}{'nodes':>7}" + "".join(f"{v:>18}" for v in variants))
    sys.stdout.write("\n")
    with loaded(options, n_draft_max=max(options.draft_n)) as engine:
        prompts = prompts_of(engine, options)
        for temperature in options.temp:
            for n_draft in options.draft_n:
                sys.stdout.write(f"{temperature:>11.2f}{n_draft:>7}")
                for name, variant in variants.items():
                    settings: GenerateOptions = {
                        **variant,
                        "temperature": temperature,
                        "draft_temperature": options.draft_temp,
                        "n_draft": n_draft,
                        "max_tokens": options.tokens,
                    }
                    lengths = [
                        written(engine, prompts, run, settings).mean_length
                        for run in range(options.runs)
                    ]
                    mean, error = mean_and_error(lengths)
                    sys.stdout.write(f"{f'{mean:.2f} +- {error:.2f}':>18}")
                    sys.stdout.flush()
                    row = {"temperature": temperature, "n_nodes": n_draft, "variant": name}
                    store(options, row | {"tokens_per_pass": lengths})
                sys.stdout.write("\n")


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Options of the models, the prompts and the texts."""
    made = argparse.ArgumentParser(
        description=description,
        prog=f"python -m tests.benchmarks.{name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("target", nargs="?", default=embedded_target())
    made.add_argument("draft", nargs="?", default=embedded_draft())
    made.add_argument("--prompts", type=Path, help="as for ggufspec audit")
    made.add_argument("--chat", action="store_true", help="with the target's chat template")
    made.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    made.add_argument("--runs", type=int, default=24, help="texts of each kind")
    made.add_argument("--tokens", type=int, default=120, help="tokens of a text")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("-o", "--output", type=Path, help="append a JSON line for each cell")
    return made


def loaded(options: argparse.Namespace, n_draft_max: int) -> Engine:
    """The pair; nothing is stored of it."""
    return load(
        options.target,
        options.draft,
        n_draft_max=n_draft_max,
        n_threads=options.threads,
        tuned=False,
    )


def prompts_of(engine: Engine, options: argparse.Namespace) -> Sequence[str | Sequence[int]]:
    """The prompts that were given, or those of the audit."""
    texts: Sequence[str] = PROMPTS
    if options.prompts:
        found = parse_prompts(options.prompts.read_bytes(), str(options.prompts), TEXTS)
        texts = [prompt.turns[0] for prompt in found]
    if options.chat:
        return [engine.render([{"role": "user", "content": text}]) for text in texts]
    return texts


def written(
    engine: Engine, prompts: Sequence[str | Sequence[int]], run: int, settings: GenerateOptions
) -> Stats:
    """The statistics of one text, without truncation; `run` chooses the prompt and the seed."""
    options: GenerateOptions = {
        **settings,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
        "seed": run,
    }
    return engine.generate(prompts[run % len(prompts)], **options).stats


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error; 0 for a single value."""
    return fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def store(options: argparse.Namespace, row: dict[str, object]) -> None:
    """Append a row to the output, if there is one."""
    if options.output:
        names = {"target": Path(options.target).stem, "draft": Path(options.draft).stem}
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(names | row) + "\n")


if __name__ == "__main__":
    main()
