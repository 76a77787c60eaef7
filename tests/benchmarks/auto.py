"""Measures `auto` against plain decoding, fixed settings and llama.cpp, prompt by prompt in turns.

    python -m tests.benchmarks.auto --target large.gguf --draft small.gguf --prompts show.jsonl \\
        --llama llama.cpp/build/bin -o texts.jsonl

`auto` begins with an empty cache and learns along the run. A text ends with the model's end token:
what a chat model writes behind it is of no use, and easier or harder to draft. Ctrl-C prints the
report of what was measured; --resume continues.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from zlib import crc32

import ggufspec
from ggufspec.bench.experiment import KINDS, rotated
from ggufspec.bench.llama_server import LlamaCppProgram
from ggufspec.drafting import profile_store
from ggufspec.engine.load import load
from ggufspec.errors import GgufspecError, PromptError
from ggufspec.llama.devices import cpu_name, n_threads_default
from tests.benchmarks import auto_options
from tests.benchmarks.ab_report import render
from tests.benchmarks.loaded_pair import FIXED, LLAMA, PLAIN, LoadedPair, cache_folder
from tests.benchmarks.prompt_sets import KindPrompt
from tests.benchmarks.speculative_simple import SpeculativeSimple
from tests.benchmarks.text_file import Text, TextFile, read_texts

_INTERRUPTED = 130
_SEED = 18
_N_WARM_UP = 16
_UNKNOWN_SECONDS = 20.0  # of a text, before any was measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print tables; exit code 130 if interrupted. Raises GgufspecError."""
    options = auto_options.parser().parse_args(arguments)
    show = {"least": options.least, "merged": options.merge}
    if options.report:
        texts = [text for path in options.report for text in read_texts(path)[1]]
        sys.stdout.write(render(texts, **show))
        return
    texts = []
    interrupted = False
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        _measure(options, texts)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.stdout.write(render(texts, **show))
    if interrupted:
        raise SystemExit(_INTERRUPTED)


# The order of texts ------------------------------------------------------------------------------


class PromptTurn(NamedTuple):
    """All contenders continue a prompt. `target`: the place of the target in the list."""

    target: int
    sampling: str
    prompt: KindPrompt
    run: int


def schedule(
    prompts: Sequence[KindPrompt], n_targets: int, samplings: Sequence[str], n_runs: int
) -> Iterator[PromptTurn]:
    """One prompt of each kind after another, the kinds in random order.

    Targets and samplings alternate, each with another kind, so that `auto` gets no text twice in a
    row (with three kinds or more); any beginning of the run has about as many texts of each.
    """
    rng = random.Random(_SEED)
    by_kind: dict[str, list[KindPrompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    for run in range(n_runs):
        for rank in range(max(map(len, by_kind.values()), default=0)):
            kinds = [kind for kind, some in by_kind.items() if rank < len(some)]
            rng.shuffle(kinds)
            step = -(-len(kinds) // len(samplings))
            for i in range(len(kinds)):
                for j, sampling in enumerate(samplings):
                    prompt = by_kind[kinds[(i + j * step) % len(kinds)]][rank]
                    for target in range(n_targets):
                        yield PromptTurn(target, sampling, prompt, run)


# Measuring ---------------------------------------------------------------------------------------


def _measure(options: argparse.Namespace, texts: list[Text]) -> None:
    """Add to `texts`, which has those of an earlier run first."""
    pairs = auto_options.pairs(options)
    prompts = auto_options.prompts(options)
    file = TextFile(options.output, _about(options, pairs), texts, resume=options.resume)
    with ExitStack() as stack:
        folder = file.cache_folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ggufspec-auto-"))
        )
        stack.enter_context(cache_folder(folder))
        if not texts:
            profile_store.forget()
        loaded = [_loaded(stack, options, *pair) for pair in pairs]
        turns = list(schedule(prompts, len(loaded), options.temps, options.runs))
        _Run(options, loaded, file, turns).measure()


def _loaded(
    stack: ExitStack, options: argparse.Namespace, name: str, target: Path, draft: Path
) -> LoadedPair:
    again = partial(load, target, draft, n_ctx=options.ctx, n_threads=options.threads)
    engine, llama = stack.enter_context(again()), None
    if options.llama:
        n_threads = options.threads or n_threads_default()
        n_draft_threads = options.llama_draft_threads or n_threads
        binary = options.llama / "llama-speculative-simple"
        program = LlamaCppProgram(binary, target, draft, options.ctx, n_threads, n_draft_threads)
        llama = SpeculativeSimple(program, engine.vocab)
    return LoadedPair(name, engine, again, llama)


@dataclass
class _Run:
    """Writes the texts of the turns that are left."""

    options: argparse.Namespace
    pairs: Sequence[LoadedPair]
    file: TextFile
    turns: Sequence[PromptTurn]
    started_at: float = field(default_factory=time.perf_counter)

    def measure(self) -> None:
        """Every turn, until the budget ends. Raises GgufspecError in a warm-up."""
        for pair in self.pairs:
            self._warm_up(pair)
        done = {(text.turn, text.contender): text for text in self.file.texts}
        for i, turn in enumerate(self.turns):
            pair = self.pairs[turn.target]
            key = (pair.name, turn.sampling, turn.prompt.name, turn.run)
            wanted = rotated(self._contenders, i)
            texts = [done[key, name] for name in wanted if (key, name) in done]
            left = [name for name in wanted if (key, name) not in done]
            if not left or self._is_short(texts):
                continue
            seconds = sum(map(self._seconds_of, left))
            spent = time.perf_counter() - self.started_at
            if self.options.budget and spent + seconds > self.options.budget:
                self._talk("the budget ends here", i)
                return
            if (tokens := self._tokens(pair, turn.prompt)) is None:
                self._talk(f"prompt {turn.prompt.name} ({turn.prompt.kind}) is too long", i)
                continue
            for name in left:
                self._talk(f"{pair.name}, {turn.sampling}, {turn.prompt.kind}: {name}", i)
                if text := self._text(pair, turn, name, tokens):
                    self.file.add(text)
                    if self._is_short([text]):
                        break  # this turn does not count

    @property
    def _contenders(self) -> list[str]:
        names: list[str] = self.options.contenders
        return [name for name in names if self.options.llama or name != LLAMA]

    def _is_short(self, texts: Sequence[Text]) -> bool:
        return any(text.n_generated < self.options.least for text in texts)

    def _warm_up(self, pair: LoadedPair) -> None:
        """Both models and llama.cpp's program run once; auto learns nothing of it."""
        tokens = pair.engine.tokenize(KINDS["open"][0])
        for name in (PLAIN, f"{FIXED}3", *([LLAMA] if pair.llama else [])):
            self._talk(f"{pair.name}: warm-up of {name}", 0)
            pair.write(name, tokens, sampling="0", n_tokens=_N_WARM_UP, seed=_SEED)
        pair.engine.forget()

    def _tokens(self, pair: LoadedPair, prompt: KindPrompt) -> list[int] | None:
        """The prompt's tokens; None if it is too long."""
        engine = pair.engine
        try:
            if self.options.prompts and engine.chat_template is not None:
                tokens = engine.render([{"role": "user", "content": prompt.text}])
            else:
                tokens = engine.tokenize(prompt.text)
        except PromptError:
            return None
        return tokens if len(tokens) + self.options.tokens <= engine.n_ctx else None

    def _text(
        self, pair: LoadedPair, turn: PromptTurn, contender: str, tokens: Sequence[int]
    ) -> Text | None:
        """One timed text; None if llama.cpp failed: the others go on."""
        at = time.time()
        seed = crc32(f"{turn.prompt.name} {turn.run} {turn.sampling}".encode())
        try:
            speed = pair.write(
                contender,
                tokens,
                sampling=turn.sampling,
                n_tokens=self.options.tokens,
                seed=seed,
            )
        except GgufspecError as error:
            if contender != LLAMA:
                raise
            sys.stderr.write(f"{contender} leaves out {turn.prompt.name}: {error}\n")
            return None
        return Text(
            target=pair.name,
            sampling=turn.sampling,
            kind=turn.prompt.kind,
            prompt=turn.prompt.name,
            run=turn.run,
            contender=contender,
            **speed._asdict(),
            wall_seconds=time.time() - at,
            at=at,
        )

    def _seconds_of(self, contender: str) -> float:
        """The expected duration of a text."""
        texts = self.file.texts
        own = [text.wall_seconds for text in texts if text.contender == contender]
        return mean(own or [text.wall_seconds for text in texts] or [_UNKNOWN_SECONDS])

    def _talk(self, message: str, n_done: int) -> None:
        """A line on stderr, with the time that the turns from here on will take."""
        spent = time.perf_counter() - self.started_at
        left = sum(map(self._seconds_of, self._contenders)) * (len(self.turns) - n_done)
        sys.stderr.write(
            f"[{spent / 60:.1f} min, turn {n_done + 1} of {len(self.turns)}, about "
            f"{left / 60:.0f} min left] {message}\n"
        )
        sys.stderr.flush()


def _about(options: argparse.Namespace, pairs: Sequence[tuple[str, Path, Path]]) -> dict[str, Any]:
    return {
        "pairs": [[name, str(target), str(draft)] for name, target, draft in pairs],
        "settings": {
            name: getattr(options, name)
            for name in ("tokens", "ctx", "threads", "llama_draft_threads")
        },
        "machine": {
            "platform": platform.platform(),
            "processor": cpu_name(),
            "n_cpus": os.cpu_count(),
            "n_threads": options.threads or n_threads_default(),
        },
        "versions": {
            "python": platform.python_version(),
            "ggufspec": ggufspec.__version__,
            **{name: version(name) for name in ("llama-cpp-python", "numpy")},
        },
    }


if __name__ == "__main__":
    main()
