"""Simulates a slow target: a small model writes, and each pass counts with the slow one's time.

The best draft length depends on pass costs and on acceptance; neither needs the slow model for each
text. Its passes are measured once. If the slow model is a stand-in that computes what the small one
does, texts are the same. Draft steps and verification are timed as they happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from ggufspec.decoding.stats import Stats
from ggufspec.decoding.types import Scored
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.options import CheckedOptions
from ggufspec.llama.context import Context
from ggufspec.llama.timing import FilledContext
from tests.benchmarks import contender_options

_N_VISITS = 10  # to each size, in random order, so that a disturbance affects no single size
_N_PASSES = 3  # per visit: the first, after a pass of another size, takes longer
_DEPTH = 64  # tokens in the cache: about as many as during a text
_SEED = 0

# Seconds of passes over so many tokens, after a pass of another size and of the same.
Samples = Mapping[tuple[int, bool], Sequence[float]]


def measure(
    target: Context, sizes: Sequence[int], report_progress: Callable[[str], None]
) -> Samples:
    """Times of passes over each number of tokens. Raises DecodeError, OptionError.

    The slowest and the fastest tenth are left out, as a disturbed sample would be drawn often.
    """
    rng = random.Random(_SEED)
    found: dict[tuple[int, bool], list[float]] = {
        (size, again): [] for size in sizes for again in (False, True)
    }
    filled = FilledContext(target, depth=_DEPTH, n_most=max(sizes))
    for visit in range(_N_VISITS):
        report_progress(f"measuring passes of the target, {visit + 1} of {_N_VISITS}")
        for size in rng.sample(list(sizes), len(sizes)):
            for i in range(_N_PASSES):
                start = perf_counter()
                filled.score(size)
                found[size, i > 0].append(perf_counter() - start)
    return {how: _usual(seconds) for how, seconds in found.items()}


def _usual(seconds: Sequence[float]) -> list[float]:
    n_left_out = len(seconds) // 10
    return sorted(seconds)[n_left_out : len(seconds) - n_left_out]


class Replay:
    """Writes with an engine, with the pass times of another target."""

    def __init__(self, engine: Engine, samples: Samples) -> None:
        self._engine = engine
        self._samples = samples
        self._rng = random.Random(_SEED)

    def write(
        self, contender: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
    ) -> Stats:
        """As contender_options.write; each pass gets the time of a random measured one."""
        options = contender_options.options(
            contender, sampling=sampling, n_tokens=n_tokens, seed=seed
        )
        tokens = self._engine.tokenize(prompt)
        text = Generation(self._engine, tokens, CheckedOptions.of(options))  # type: ignore[arg-type]
        before = 0
        while text.is_reading:
            text.read()
        while (ask := text.ask()) is not None:
            size = 1 + len(ask.draft)
            seconds = self._rng.choice(self._samples[size, size == before])
            text.answer(Scored(text.session.score(*ask), seconds))
            before = size
        return text.completion.stats
