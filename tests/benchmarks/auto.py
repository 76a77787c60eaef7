"""Is `auto` as good as the best fixed length, never worse than plain, and ahead of llama.cpp?

    python -m tests.benchmarks.auto --target large.gguf --llama llama-speculative-simple --grid

In each condition (target, draft, sampling, kind of prompt) all contenders generate the same number
of tokens after the same prompts, in alternation; ab_report.py evaluates the times. Ctrl-C keeps
what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ggufspec.bench.contenders import rotated
from ggufspec.bench.llama_cpp_runner import LlamaCppProgram
from ggufspec.bench.prompts import KINDS
from ggufspec.common import defaults
from ggufspec.decoding.stats import Stats
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.errors import OptionError
from ggufspec.llama.devices import cpu_name, n_threads_default
from ggufspec.llama.lookup import BaselineText
from tests.benchmarks import ab_report_text, cold_start, contender_options, llama_grid
from tests.benchmarks.ab_report import (
    AUTO,
    FINALS,
    FIXED,
    GRID,
    LLAMA,
    PLAIN,
    SURVEY,
    Condition,
    Text,
    best,
    speedups_of,
)
from tests.benchmarks.auto_options import parser
from tests.benchmarks.replay import Replay, Samples, measure
from tests.benchmarks.shuffled_draft import write_shuffled

_N_FINALISTS = 3
_INTERRUPTED = 130
_FIRST_SEED_OF_FINALS = 1_000_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables; exit code 130 if interrupted. Raises GgufspecError."""
    options = parser().parse_args(arguments)
    if options.report:
        texts = [
            text
            for path in options.report
            for text in ab_report_text.texts_from(json.loads(path.read_text()))
        ]
        sys.stdout.write(ab_report_text.render(texts))
        return
    if not options.target:
        raise OptionError("no target to measure; give --target large.gguf")
    if options.replay and (options.llama or options.cold_start):
        raise OptionError("--replay cannot be combined with --llama or --cold-start")
    with tempfile.TemporaryDirectory(prefix="ggufspec-bench-") as folder:
        pairs = _pairs(options, Path(folder))
        interrupted = (
            _cold_start(options, pairs) if options.cold_start else _conditions(options, pairs)
        )
    if interrupted:
        raise SystemExit(_INTERRUPTED)


@dataclass(frozen=True)
class _Pair:
    target: Path
    draft: Path
    adversarial: bool


def _pairs(options: argparse.Namespace, folder: Path) -> list[_Pair]:
    pairs = [_Pair(target, options.draft, False) for target in options.target]
    if options.adversarial:
        shuffled = write_shuffled(options.draft, folder)
        pairs += [_Pair(target, shuffled, True) for target in options.target]
    return pairs


# Writes one text: contender and prompt, with the options of the condition.
_Write = Callable[..., Stats | BaselineText]


@dataclass(frozen=True)
class _Writers:
    ours: _Write
    llama: _Write | None


# Conditions --------------------------------------------------------------------------------------


@dataclass
class _Bench:
    """The texts so far; prints progress."""

    options: argparse.Namespace
    n_expected: int
    texts: list[Text] = field(default_factory=list)
    n_warm: int = 0
    started_at: float = field(default_factory=perf_counter)

    def talk(self, message: str) -> None:
        """A line on stderr, with the estimated time that is left."""
        seconds = perf_counter() - self.started_at
        n_done = len(self.texts) + self.n_warm
        left = seconds / max(n_done, 1) * max(self.n_expected - n_done, 0)
        about = f"about {left / 60:.1f} min left" if n_done else ""
        sys.stderr.write(f"[{seconds / 60:6.1f} min] {message}  {about}\n")
        sys.stderr.flush()


def _conditions(options: argparse.Namespace, pairs: Sequence[_Pair]) -> bool:
    """Measure every condition; whether the user interrupted it."""
    n_conditions_of_pair = len(options.temps) * len(options.prompts)
    n_expected = n_conditions_of_pair * sum(_n_texts(options, pair) for pair in pairs)
    bench = _Bench(options, n_expected)
    settings = {**_circumstances(options), "mode": "conditions"}
    interrupted = False
    try:
        for pair in pairs:
            with _loaded(options, pair, replayed=options.replay) as engine:
                writers = _writers(bench, pair, engine)
                for sampling in options.temps:
                    for kind in options.prompts:
                        condition = Condition(
                            pair.target.stem, pair.draft.stem, sampling, kind, pair.adversarial
                        )
                        _measure(bench, condition, writers)
                        _save(options.json, ab_report_text.document(bench.texts, settings))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if bench.texts:
            done = {**settings, "interrupted": interrupted}
            _save(options.json, ab_report_text.document(bench.texts, done))
            sys.stdout.write(ab_report_text.render(bench.texts))
    return interrupted


def _loaded(options: argparse.Namespace, pair: _Pair, *, replayed: Path | None = None) -> Engine:
    """`replayed`: the model that writes in place of the target; nothing about it is stored."""
    return load(
        replayed or pair.target,
        pair.draft,
        n_draft_max=max(*options.lengths, defaults.N_DRAFT_MAX),
        n_threads=options.threads,
        tuned=not replayed,
    )


def _writers(bench: _Bench, pair: _Pair, engine: Engine) -> _Writers:
    if bench.options.replay:
        return _Writers(Replay(engine, _samples(bench, pair)).write, None)
    program = _llama_program(bench, pair, engine)
    theirs = partial(_llama_writes, program, engine) if program else None
    return _Writers(partial(contender_options.write, engine), theirs)


def _samples(bench: _Bench, pair: _Pair) -> Samples:
    """Times of the target's passes; the target itself writes no texts."""
    with _loaded(bench.options, pair) as engine:
        sizes = range(1, engine.n_draft_max + 2)
        return measure(engine.target, sizes, bench.talk)


def _measure(bench: _Bench, condition: Condition, writers: _Writers) -> None:
    """The survey of one condition, then its finals."""
    options = bench.options
    ours = _ours(options)
    for name in ours:  # warm-up; auto learns pass costs during a whole text
        n_tokens = options.tokens if name == AUTO else min(options.warm_up, options.tokens)
        prompt = KINDS[condition.prompts][0]
        writers.ours(name, prompt, sampling=condition.sampling, n_tokens=n_tokens, seed=0)
        bench.n_warm += 1
    has_grid = writers.llama and options.grid
    grid = [combination.name for combination in llama_grid.GRID] if has_grid else []
    at = len(bench.texts)
    for run in range(options.survey_runs):
        others = grid if run == 0 else []  # the grid once on each prompt
        _turns(bench, condition, SURVEY, run, [*ours, *others], writers)
    speedups = speedups_of(bench.texts[at:])
    fixed = [name for name in ours if name.startswith(FIXED)]
    finalists = [name for name in ours if name not in fixed]
    finalists += best(speedups, FIXED, _N_FINALISTS) or fixed
    if writers.llama:
        finalists += [LLAMA, *best(speedups, GRID, _N_FINALISTS)]
    for run in range(options.runs):
        _turns(bench, condition, FINALS, run, finalists, writers)


def _turns(
    bench: _Bench,
    condition: Condition,
    stage: str,
    run: int,
    contenders: Sequence[str],
    writers: _Writers,
) -> None:
    """Each contender after each prompt, in rotated order."""
    n_tokens = bench.options.tokens
    prompts = KINDS[condition.prompts][: bench.options.n_prompts]
    for n_prompt, prompt in enumerate(prompts):
        turn = run * len(prompts) + n_prompt
        seed = turn + _FIRST_SEED_OF_FINALS * (stage == FINALS)
        bench.talk(f"{condition.name}: {stage}, run {run + 1}, prompt {n_prompt + 1}")
        for name in rotated(contenders, turn):
            write = writers.ours
            if writers.llama and name.startswith((LLAMA, GRID)):
                write = writers.llama
            found = write(name, prompt, sampling=condition.sampling, n_tokens=n_tokens, seed=seed)
            bench.texts.append(
                Text(
                    condition=condition,
                    stage=stage,
                    turn=f"{run}.{n_prompt}",
                    contender=name,
                    tokens_per_second=found.tokens_per_second,
                    n_generated=found.n_generated,
                    n_drafted=found.n_drafted,
                    n_accepted=found.n_accepted,
                )
            )


def _llama_program(bench: _Bench, pair: _Pair, engine: Engine) -> LlamaCppProgram | None:
    """llama.cpp with this pair, its draft with the best number of threads."""
    options = bench.options
    if not options.llama or pair.adversarial:
        return None
    n_threads = options.threads or n_threads_default()
    program = LlamaCppProgram(
        options.llama, pair.target, pair.draft, engine.n_ctx, n_threads, n_threads
    )
    choices = [replace(program, n_threads_draft=n) for n in sorted({1, n_threads})]
    found = [
        [
            llama_grid.run(program, LLAMA, prompt, sampling="0", n_tokens=options.tokens, seed=0)
            for program in choices
        ]
        for prompt in KINDS["open"][: options.n_prompts]
    ]
    rates = {
        program.n_threads_draft: median(turn[i].tokens_per_second for turn in found)
        for i, program in enumerate(choices)
    }
    n_best = max(rates, key=lambda n: rates[n])
    shown = ", ".join(f"{n}: {rate:.1f} t/s" for n, rate in rates.items())
    bench.talk(f"llama.cpp's draft of {pair.target.stem} gets {n_best} threads ({shown})")
    return replace(program, n_threads_draft=n_best)


def _llama_writes(
    program: LlamaCppProgram, engine: Engine, name: str, prompt: str, **how: Any
) -> BaselineText:
    found = llama_grid.run(program, name, prompt, **how)
    n_ours = len(engine.tokenize(prompt))
    if found.n_prompt != n_ours:
        raise OptionError(
            f"llama.cpp read {found.n_prompt} tokens where we read {n_ours}, of {prompt!r}; they "
            "must be the same: give a llama.cpp of the version that llama-cpp-python has"
        )
    return found


def _ours(options: argparse.Namespace) -> list[str]:
    """Our contenders: "fixed" is every length."""
    lengths = [f"{FIXED}{n}" for n in options.lengths]
    expanded = {AUTO: [AUTO], "fixed": lengths}
    others = (name for kind in options.contenders for name in expanded.get(kind, ()))
    return [PLAIN, *others]  # the base of all speed-ups


def _n_texts(options: argparse.Namespace, pair: _Pair) -> int:
    """About how many texts a condition of this pair takes, with its warm-up."""
    n_ours = len(_ours(options))
    n_fixed = len(options.lengths) if "fixed" in options.contenders else 0
    n_prompts: int = min(options.n_prompts, max(map(len, KINDS.values())))
    has_llama = bool(options.llama) and not pair.adversarial
    n_grid = len(llama_grid.GRID) if has_llama and options.grid else 0
    n_finalists = n_ours - n_fixed + min(n_fixed, _N_FINALISTS)
    n_finalists += has_llama + min(n_grid, _N_FINALISTS)
    n_turns: int = options.survey_runs * n_ours + options.runs * n_finalists + n_grid
    return n_ours + n_turns * n_prompts


# Cold start ------------------------------------------------------------------------------------


def _cold_start(options: argparse.Namespace, pairs: Sequence[_Pair]) -> bool:
    """Measure fresh processes; whether the user interrupted it."""
    settings = {**_circumstances(options), "mode": "first"}
    contenders = [name for name in _ours(options) if name != PLAIN]
    done: list[cold_start.ColdStartText] = []
    interrupted = False
    try:
        for found in cold_start.measure(
            [(pair.target, pair.draft) for pair in pairs],
            options.temps,
            options.prompts,
            [PLAIN, *contenders],
            n_tokens=options.cold_start_tokens,
            n_runs=options.runs,
        ):
            done.append(found)
            sys.stderr.write(
                f"{found.condition}: {found.contender} {found.tokens_per_second:.1f} t/s\n"
            )
            _save(options.json, {**settings, "texts": [text._asdict() for text in done]})
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if done:
            sys.stdout.write(cold_start.render(done))
    return interrupted


# Helpers -----------------------------------------------------------------------------------------


def _save(path: Path | None, document: dict[str, Any]) -> None:
    """Write a document atomically."""
    if path is None:
        return
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(unfinished, path)


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": {
            "platform": platform.platform(),
            "processor": cpu_name(),
            "n_cpus": os.cpu_count(),
            "n_threads": options.threads or n_threads_default(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("ggufspec", "llama-cpp-python", "numpy")},
        },
        "settings": {name: _plain(value) for name, value in vars(options).items()},
    }


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    main()
