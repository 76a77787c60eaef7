"""Options of the contenders of a benchmark, by their names: "auto", "fixed 3", "llama"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ggufspec.bench import llama_server
from ggufspec.bench.baselines import Baseline
from ggufspec.bench.llama_server import LlamaCppProgram
from ggufspec.decoding.stats import Stats
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.llama.vocab import Vocab
from tests.benchmarks.speculative_simple import SpeculativeSimple

PLAIN, AUTO = "plain", "auto"
AUTO_NEW = "auto new"  # auto with an engine of its own, which has measured nothing yet
AUTO_CHAINS = "auto chains"  # auto without trees; it shares what auto has measured
NGRAM, FIXED = "ngram ", "fixed "  # and the draft length; fixed: of the draft model
LLAMA, GRID = "llama", "llama n "  # llama-speculative-simple: its defaults, "llama n 7 p 0.75"
SERVER, SERVER_PLAIN = "llama-server", "llama-server plain"  # with the draft, and without

_DRAFTERS = {NGRAM: "ngram", FIXED: "model"}
_GRID_POINT = re.compile(rf"{GRID}(\d+) p ([\d.]+)")
_TRUNCATION = ("20", "0.8", "0")  # top-k, top-p, min-p, as Qwen2.5 recommends


def is_llama(contender: str) -> bool:
    """Whether it is a program of llama.cpp."""
    return contender.startswith(LLAMA)


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
        f"'{AUTO_CHAINS}', '{NGRAM}3', '{FIXED}3', '{LLAMA}', '{GRID}7 p 0.75', '{SERVER}' and "
        f"'{SERVER_PLAIN}'"
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


def options(contender: str, *, sampling: str, n_tokens: int, seed: int) -> dict[str, Any]:
    """The generation options for a text of at most n_tokens."""
    return {
        "seed": seed,
        **options_of(contender),
        **sampling_options(sampling),
        "max_tokens": n_tokens,
    }


def write(
    engine: Engine,
    contender: str,
    prompt: str | Sequence[int],
    *,
    sampling: str,
    n_tokens: int,
    seed: int,
) -> Stats:
    """Continue a prompt by at most n_tokens."""
    how = options(contender, sampling=sampling, n_tokens=n_tokens, seed=seed)
    return engine.generate(prompt, **how).stats


@contextmanager
def llama_programs(
    loaded: LlamaCppProgram, names: Sequence[str], vocab: Vocab
) -> Iterator[Mapping[str, Baseline]]:
    """llama.cpp's contenders by name; servers run during the block. Raises OptionError.

    `loaded`: the models; its `binary` is the folder of llama.cpp's programs. `vocab`: the target's.
    """
    folder = loaded.binary
    with ExitStack() as stack:
        found = {}
        for name in names:
            if name in (SERVER, SERVER_PLAIN):
                draft = loaded.draft if name == SERVER else None
                program = replace(loaded, binary=folder / "llama-server", draft=draft)
                server = stack.enter_context(llama_server.running(program))
                found[name] = Baseline(name, server)
            else:
                program = replace(loaded, binary=folder / "llama-speculative-simple")
                found[name] = Baseline(name, SpeculativeSimple(program, vocab, draft_options(name)))
        yield found


def draft_options(contender: str) -> list[str]:
    """What llama-speculative-simple gets of a point of the grid. Raises OptionError."""
    if contender == LLAMA:
        return []
    point = _GRID_POINT.fullmatch(contender)
    if point is None:
        options_of(contender)  # raises
    assert point is not None
    return ["--spec-draft-n-max", point[1], "--spec-draft-p-min", point[2]]


def check(contender: str) -> None:
    """Raises OptionError for an unknown name."""
    if contender in (SERVER, SERVER_PLAIN):
        return
    if is_llama(contender):
        draft_options(contender)
    else:
        options_of(contender)
