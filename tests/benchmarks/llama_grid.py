"""Runs llama-speculative-simple at its defaults, or with the draft lengths and p-mins of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ggufspec.bench import llama_cpp_runner
from ggufspec.bench.llama_cpp_runner import LlamaCppProgram
from ggufspec.decoding.sampling import Sampling
from ggufspec.llama.lookup import BaselineRequest, BaselineText


class GridPoint(NamedTuple):
    """The most tokens that it drafts, and the probability below which it stops."""

    n_max: int
    p_min: float

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return f"llama n {self.n_max} p {self.p_min:g}"


GRID = tuple(
    GridPoint(n_max, p_min)
    for n_max, p_min in product((2, 3, 5, 7, 11, 15), (0.0, 0.3, 0.5, 0.75, 0.9))
)
_BY_NAME = {point.name: point for point in GRID}  # any other name: its defaults


def run(
    program: LlamaCppProgram, name: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> BaselineText:
    """One text, at its defaults or at a grid point. Raises OptionError."""
    return llama_cpp_runner.run(
        command(program, name, prompt, sampling=sampling, n_tokens=n_tokens, seed=seed)
    )


def command(
    program: LlamaCppProgram, name: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> list[str]:
    """The command line of one text."""
    options = list(_sampling(sampling))
    if point := _BY_NAME.get(name):
        options += ["--spec-draft-n-max", str(point.n_max)]
        options += ["--spec-draft-p-min", f"{point.p_min:g}"]
    request = BaselineRequest((), Sampling(), n_tokens, seed, ignore_eos=True, text=prompt)
    return llama_cpp_runner.text_command(program, request, options)


def _sampling(sampling: str) -> Sequence[str]:
    """No truncation at a temperature; at 0, llama.cpp's own chain gives the same, faster.

    Penalties, DRY, typical, top-n-sigma and XTC stay in the chain and are off by default.
    """
    if sampling == "default":
        return ()
    if float(sampling) == 0:
        return ("--temp", "0")
    return ("--temp", sampling, "--top-k", "0", "--top-p", "1", "--min-p", "0")
