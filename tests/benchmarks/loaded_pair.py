"""The contenders of `tests.benchmarks.auto` by name, and how each writes a text with a pair."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.common.files import CACHE_VARIABLE
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.llama.python_llama import BaselineRequest
from tests.benchmarks.speculative_simple import SpeculativeSimple

PLAIN, AUTO = "plain", "auto"
AUTO_NEW = "auto new"  # auto with an engine of its own, which has measured nothing yet
AUTO_CHAINS = "auto chains"  # auto without trees; it shares what auto has measured
NGRAM, FIXED = "ngram ", "fixed "  # and the draft length; fixed: of the draft model
LLAMA = "llama"  # llama-speculative-simple at its defaults

_DRAFTERS = {NGRAM: "ngram", FIXED: "model"}
_TRUNCATION = ("20", "0.8", "0")  # top-k, top-p, min-p, as Qwen2.5 recommends


def options_of(contender: str) -> dict[str, Any]:
    """The generation options of one of ours. Raises OptionError for an unknown name."""
    if contender == PLAIN:
        return {"drafter": "none"}
    if contender in (AUTO, AUTO_NEW, AUTO_CHAINS):
        # Without a seed, as it is mostly used: a text with a seed updates no measured costs.
        only_chains = {"tree": "off"} if contender == AUTO_CHAINS else {}
        return {"drafter": "auto", "n_draft": "auto", "seed": None, **only_chains}
    for prefix, drafter in _DRAFTERS.items():
        n_draft = contender.removeprefix(prefix)
        if contender.startswith(prefix) and n_draft.isdecimal():
            return {"drafter": drafter, "n_draft": int(n_draft)}
    raise OptionError(
        f"unknown contender {contender!r}; there are '{PLAIN}', '{AUTO}', '{AUTO_NEW}', "
        f"'{AUTO_CHAINS}', '{NGRAM}3', '{FIXED}3' and '{LLAMA}'"
    )


def sampling_options(sampling: str) -> dict[str, Any]:
    """A temperature; with top-k, top-p and min-p where they differ: "0.7", "0.7/40/0.95/0.05"."""
    temperature, *given = sampling.split("/")
    top_k, top_p, min_p = [*given, *_TRUNCATION[len(given) :]]
    return {
        "temperature": float(temperature),
        "top_k": int(top_k),
        "top_p": float(top_p),
        "min_p": float(min_p),
    }


class Speed(NamedTuple):
    """How fast a text was generated, without its prompt; counts are of tokens."""

    tokens_per_second: float
    n_generated: int
    n_drafted: int
    n_accepted: int


@dataclass(frozen=True)
class LoadedPair:
    """Valid until the engine is closed. `load` loads the pair once more; `llama`: None: without."""

    name: str
    engine: Engine
    load: Callable[[], Engine]
    llama: SpeculativeSimple | None

    def write(
        self, contender: str, tokens: Sequence[int], *, sampling: str, n_tokens: int, seed: int
    ) -> Speed:
        """One text of at most n_tokens. Raises GgufspecError."""
        if contender == LLAMA:
            return self._by_llama(tokens, sampling, n_tokens, seed)
        with ExitStack() as stack:
            engine = self.engine
            if contender == AUTO_NEW:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ggufspec-new-"))
                stack.enter_context(cache_folder(Path(folder)))
                engine = stack.enter_context(self.load())
            elif contender in (AUTO, AUTO_CHAINS):
                engine.forget()  # so that the draft reads the prompt, which auto may learn from
            how = {"seed": seed, **options_of(contender), **sampling_options(sampling)}
            found = engine.generate(tokens, max_tokens=n_tokens, **how).stats
        return Speed(found.tokens_per_second, found.n_generated, found.n_drafted, found.n_accepted)

    def _by_llama(self, tokens: Sequence[int], sampling: str, n_tokens: int, seed: int) -> Speed:
        assert self.llama is not None
        chosen = Sampling(**sampling_options(sampling))
        found = self.llama.write(BaselineRequest(tokens, chosen, n_tokens, seed, ignore_eos=False))
        n_generated = found.n_generated
        if n_generated < n_tokens:  # it counts the end token, and tokens accepted behind it
            n_generated = min(n_generated - 1, len(found.tokens))
        rate = found.tokens_per_second * n_generated / max(found.n_generated, 1)
        return Speed(rate, n_generated, found.n_drafted, found.n_accepted)


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
