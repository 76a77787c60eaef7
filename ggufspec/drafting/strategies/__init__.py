"""The drafters, found by file name: one file a strategy, each with a function `make`.

Knows which drafters exist and what they may be made of. No llama_cpp, no logits of the target.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Drafter, Session, Uniforms
from ggufspec.drafting.draft_length import FixedLength, LengthPolicy
from ggufspec.errors import OptionError


@dataclass(frozen=True)
class Materials:
    """What a drafter may be made of. `stop_tokens` end a text: nothing is drafted behind them."""

    sampling: Sampling  # the target's
    uniforms: Callable[[int], Uniforms]
    stop_tokens: Collection[int]
    session: Session | None = None  # the draft model, where there is one
    draft_temperature: float | str = defaults.DRAFT_TEMPERATURE
    n_draft_max: int = defaults.N_DRAFT_MAX  # the most that will be asked for in a round
    policy: LengthPolicy = field(default_factory=FixedLength)  # how far a draft model goes


def names() -> list[str]:
    """The drafters that there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make(name: str, materials: Materials) -> Drafter:
    """The drafter of that name. Raises OptionError if there is none, or it lacks what it needs."""
    if name not in names():
        raise OptionError(f"there is no drafter {name!r}; choose from {', '.join(names())}")
    drafter: Drafter = importlib.import_module(f"{__name__}.{name}").make(materials)
    return drafter
