"""Generation options of contenders by name: "plain", "fixed 3", "auto"; writes one text."""

from __future__ import annotations

from typing import Any

from ggufspec.decoding.stats import Stats
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from tests.benchmarks.ab_report import AUTO, FIXED, PLAIN

__all__ = ["AUTO", "FIXED", "PLAIN", "options", "options_of", "sampling_options", "write"]


def options_of(contender: str) -> dict[str, Any]:
    """The generation options of a contender. Raises OptionError for an unknown name."""
    if contender == PLAIN:
        return {"drafter": "none"}
    if contender == AUTO:
        # Without a seed, as it is mostly used: a text with a seed updates no measured costs.
        return {"drafter": "auto", "n_draft": "auto", "seed": None}
    n_draft = contender.removeprefix(FIXED)
    if contender.startswith(FIXED) and n_draft.isdecimal():
        return {"drafter": "model", "n_draft": int(n_draft)}
    raise OptionError(
        f"unknown contender {contender!r}; there are '{PLAIN}', '{AUTO}' and '{FIXED}3'"
    )


def sampling_options(sampling: str) -> dict[str, Any]:
    """A temperature without truncation, or "default": llama.cpp's and ours."""
    if sampling == "default":
        return {}
    return {"temperature": float(sampling), "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def options(contender: str, *, sampling: str, n_tokens: int, seed: int) -> dict[str, Any]:
    """The generation options for a text of exactly n_tokens."""
    return {
        "seed": seed,
        **options_of(contender),
        **sampling_options(sampling),
        "max_tokens": n_tokens,
        "ignore_eos": True,
    }


def write(
    engine: Engine, contender: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> Stats:
    """Continue a prompt by exactly n_tokens."""
    how = options(contender, sampling=sampling, n_tokens=n_tokens, seed=seed)
    return engine.generate(prompt, **how).stats
