"""A target and a draft, loaded for all contenders of a benchmark, and how each writes a text."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ggufspec.bench.baselines import Baseline
from ggufspec.bench.llama_server import LlamaCppProgram
from ggufspec.common.files import CACHE_VARIABLE
from ggufspec.engine.engine import Engine
from tests.benchmarks import contender_options
from tests.benchmarks.contender_options import AUTO, AUTO_CHAINS, AUTO_NEW, is_llama


class Speed(NamedTuple):
    """How fast a text was generated, without its prompt; counts are of tokens."""

    tokens_per_second: float
    n_generated: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True)
class LoadedPair:
    """Valid until the block of `opened` ends. `load` loads the pair once more."""

    name: str
    engine: Engine
    load: Callable[[], Engine]
    baselines: Mapping[str, Baseline]

    def write(
        self, contender: str, tokens: Sequence[int], *, sampling: str, n_tokens: int, seed: int
    ) -> Speed:
        """One text of at most n_tokens. Raises GgufspecError."""
        if is_llama(contender):
            return self._by_llama(contender, tokens, sampling, n_tokens, seed)
        with ExitStack() as stack:
            engine = self.engine
            if contender == AUTO_NEW:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ggufspec-new-"))
                stack.enter_context(cache_folder(Path(folder)))
                engine = stack.enter_context(self.load())
            elif contender in (AUTO, AUTO_CHAINS):
                engine.forget()  # so that the draft reads the prompt, which auto may learn from
            found = contender_options.write(
                engine, contender, tokens, sampling=sampling, n_tokens=n_tokens, seed=seed
            )
        return Speed(found.tokens_per_second, found.n_generated, found.n_drafted, found.n_accepted)

    def _by_llama(
        self, contender: str, tokens: Sequence[int], sampling: str, n_tokens: int, seed: int
    ) -> Speed:
        found = self.baselines[contender].write(
            tokens,
            options=contender_options.sampling_options(sampling),
            n_tokens=n_tokens,
            seed=seed,
        )
        n_generated = found.n_generated
        if n_generated < n_tokens:  # it counts the end token, and tokens accepted behind it
            n_generated -= 1
            n_generated = min(n_generated, len(found.tokens))
        rate = found.tokens_per_second * n_generated / max(found.n_generated, 1)
        return Speed(rate, n_generated, found.n_drafted, found.n_accepted)


@contextmanager
def opened(
    name: str,
    load: Callable[[], Engine],
    program: LlamaCppProgram | None,
    contenders: Sequence[str],
) -> Iterator[LoadedPair]:
    """The pair, and of llama.cpp what `contenders` need of the folder `program.binary`.

    The context of `program` is the engine's. Raises GgufspecError.
    """
    with ExitStack() as stack:
        engine = stack.enter_context(load())
        baselines: Mapping[str, Baseline] = {}
        if program:
            names = [each for each in contenders if is_llama(each)]
            programs = contender_options.llama_programs(program, names, engine.vocab)
            baselines = stack.enter_context(programs)
        yield LoadedPair(name, engine, load, baselines)


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Another cache folder during the block."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[CACHE_VARIABLE]
        if before is not None:
            os.environ[CACHE_VARIABLE] = before
