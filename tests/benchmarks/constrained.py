"""Measures text under a JSON schema: speed with and without forced text, and the time of masks.

    python -m tests.benchmarks.constrained TARGET [--draft DRAFT] [--temp 0.7]
    python -m tests.benchmarks.constrained --masks MODEL MODEL ...

Speed: an object of ten fields, all contenders in turns; ratios to plain decoding under the schema.
Masks: milliseconds of a round outside the models, on logits of random numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import ggufspec
from ggufspec.decoding.sampling import Rows, to_probs
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine

_TEXT = {"type": "string", "maxLength": 60}
FIELDS: Mapping[str, Mapping[str, object]] = {
    "name": _TEXT,
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": _TEXT,
    "married": {"type": "boolean"},
    "customer_type": {"enum": ["private", "business", "public_sector"]},
    "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    "height_in_metres": {"type": "number"},
    "occupation": _TEXT,
    "favourite_colour": {"enum": ["red", "green", "blue", "yellow"]},
    "short_biography": {"type": "string", "maxLength": 160},
}
SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
}
PEOPLE = (
    "a retired teacher from Lisbon",
    "a young engineer in Nairobi",
    "the owner of a small bakery in Lyon",
    "a musician who lives in Chicago",
    "a nurse from Manila",
    "a farmer in the north of Sweden",
)
CONTENDERS: Mapping[str, Mapping[str, object]] = {
    "plain, no schema": {"drafter": "none", "json_schema": None},
    "plain": {"drafter": "none"},
    "forced text": {"drafter": "forced"},
    "without draft model": {"drafter": "ngram"},
    "with draft model": {"drafter": "auto"},
}
_TEMPLATE_FREE = "A JSON object with the fields {fields} that describes {person}:\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.benchmarks.constrained"
    )
    parser.add_argument("target", nargs="*")
    parser.add_argument("--draft")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--masks", nargs="+", default=[], metavar="MODEL")
    options = parser.parse_args(arguments)
    for path in options.target:
        measure_speed(path, options)
    for path in options.masks:
        measure_masks(path)


def measure_speed(path: str, options: argparse.Namespace) -> None:
    """Print tokens per second of each contender, and its ratio to plain decoding by text."""
    with ggufspec.load(target=path, draft=options.draft) as engine:
        names = [name for name in CONTENDERS if options.draft or name != "with draft model"]
        speeds: dict[str, list[float]] = {name: [] for name in names}
        lines: dict[str, list[int]] = {name: [] for name in names}
        forced: list[float] = []
        for run in range(options.runs + 1):  # the first one warms up
            for i, person in enumerate(PEOPLE):
                for name in names if (run + i) % 2 else reversed(names):
                    given: dict[str, Any] = {"json_schema": SCHEMA, **CONTENDERS[name]}
                    done = engine.generate(
                        _prompt(engine, person),
                        temperature=options.temp,
                        top_p=0.8,
                        top_k=20,
                        max_tokens=options.tokens,
                        **given,
                    )
                    if not run:
                        continue
                    speeds[name].append(done.stats.tokens_per_second)
                    lines[name].append(done.stats.n_rounds)
                    if name == "forced text":
                        forced.append(done.stats.notes.get("forced_acceptance", 0.0))
    _print(f"{path}, temperature {options.temp}; ratios to 'plain', median (range over texts)")
    for name in names:
        pairs = zip(speeds[name], speeds["plain"], strict=True)
        ratios = sorted(speed / plain for speed, plain in pairs)
        _print(
            f"  {name:20} {median(speeds[name]):6.1f} t/s  {median(ratios):.2f} "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f})  {median(lines[name]):.0f} passes"
        )
    _print(f"  forced tokens accepted: {np.mean(forced):.1%}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prompt(engine: Engine, person: str) -> Sequence[int]:
    wanted = f"Describe {person} (invented) as a JSON object with {', '.join(FIELDS)}."
    if engine.chat_template:
        return engine.render([{"role": "user", "content": wanted}])
    return engine.tokenize(_TEMPLATE_FREE.format(fields=", ".join(FIELDS), person=person))


def measure_masks(path: str) -> None:
    """Print the time of a round of plain decoding, and of one that verifies four tokens."""
    with ggufspec.load(target=path, n_ctx=1024) as engine:
        prompt = _prompt(engine, PEOPLE[0])
        done = engine.generate(
            prompt, json_schema=SCHEMA, temperature=0, max_tokens=160, n_draft="auto"
        )
        n_vocab, text = engine.vocab.n_tokens, [*prompt, *done.tokens]
        logits = np.random.default_rng(0).normal(0, 3, (5, n_vocab)).astype(np.float32)
        rows = Rows(5, n_vocab)
        for top_k, top_p in ((40, 0.95), (0, 1.0)):
            chosen = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": 0.0}
            for n in (1, 5):
                samplings = {
                    "without": scoring.sampling(engine, prompt, **chosen),  # type: ignore[arg-type]
                    "under the schema": scoring.sampling(
                        engine,
                        prompt,
                        json_schema=SCHEMA,
                        **chosen,  # type: ignore[arg-type]
                    ),
                }
                found = []
                for name, sampling in samplings.items():
                    seconds = []
                    for end in range(len(prompt), len(text) - n, n):
                        start = perf_counter()
                        to_probs(
                            logits[:n], sampling, text[:end], text[end : end + n - 1], out=rows
                        )
                        rows.pick(n - 1, 0.5)
                        seconds.append(perf_counter() - start)
                    ranked = sorted(seconds)
                    middle, most = median(ranked) * 1e3, ranked[int(0.9 * len(ranked))] * 1e3
                    found.append(f"{name} {middle:.3f} (90 %: {most:.3f}) ms")
                _print(f"{n_vocab:,} tokens, top-k {top_k}, {n} rows: {', '.join(found)}")


if __name__ == "__main__":
    main()
