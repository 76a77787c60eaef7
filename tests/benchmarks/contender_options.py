"""The contenders by name: which options each of them is, and one text written by it.

Knows an engine and names such as "plain", "fixed 3" and "auto"; neither turns nor statistics.
"""

from __future__ import annotations

from typing import Any

from ggufspec.decoding.stats import Stats
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from tests.benchmarks.ab_report import AUTO, FIXED, PLAIN

__all__ = ["AUTO", "FIXED", "PLAIN", "options", "options_of", "sampling_options", "write"]


def options_of(contender: str) -> dict[str, Any]:
    """The options of generation that a contender is. Raises OptionError for a name of none."""
    if contender == PLAIN:
        return {"drafter": "none"}
    if contender == AUTO:
        # As people mostly run it: a text with a seed learns nothing of its costs.
        return {"drafter": "auto", "n_draft": "auto", "seed": None}
    n_draft = contender.removeprefix(FIXED)
    if contender.startswith(FIXED) and n_draft.isdecimal():
        return {"drafter": "model", "n_draft": int(n_draft)}
    raise OptionError(
        f"there is no contender {contender!r}; there are '{PLAIN}', '{AUTO}' and '{FIXED}3'"
    )


def sampling_options(sampling: str) -> dict[str, Any]:
    """A temperature truncates nothing; "default" is llama.cpp's, which is also ours."""
    if sampling == "default":
        return {}
    return {"temperature": float(sampling), "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def options(contender: str, *, sampling: str, n_tokens: int, seed: int) -> dict[str, Any]:
    """The options of generation for one text of exactly so many tokens."""
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
    """Continue a prompt by exactly so many tokens."""
    how = options(contender, sampling=sampling, n_tokens=n_tokens, seed=seed)
    return engine.generate(prompt, **how).stats
