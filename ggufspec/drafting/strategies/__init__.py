"""The drafting strategies, found by file name: one file each, with a function `make`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from ggufspec import _native
from ggufspec.common import defaults
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Drafter, Session, Uniforms, Verify
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.forced_text import ForcedText
from ggufspec.errors import OptionError


@dataclass(frozen=True)
class Materials:
    """What a drafter may use."""

    sampling: Sampling  # the target's
    uniforms: Callable[[int], Uniforms]
    stop_tokens: Collection[int]  # each ends a text: nothing is drafted after it
    session: Session | None = None  # of the draft model, if there is one
    draft_temperature: float | None = None  # None: the target's
    n_draft_max: int = defaults.N_DRAFT_MAX  # most tokens that a round asks for
    tree: str = defaults.TREE  # add branches: "auto" (if they are expected to pay), "on" or "off"
    n_leaves: int = 1  # most leaves of a tree; 1: the target reads chains only
    policy: LengthPolicy = field(default_factory=LengthPolicy)  # decides how far to draft
    forced: ForcedText = field(default_factory=ForcedText)  # from the sampling's constraint
    prediction: Sequence[int] = ()  # tokens that the text is expected to repeat
    texts: Sequence[_native.SortedTexts] = ()  # other texts, which the text may repeat
    read_as: Sequence[int] = ()  # the prompt as n-grams read it; empty: as it is
    stage: Stage | None = None  # drafts the draft model's own tokens, for the strategy `staged`


@dataclass(frozen=True)
class Stage:
    """Drafts for a draft model from n-grams; the rule and the uniforms verify these."""

    materials: Materials
    verify: Verify
    uniforms: Callable[[int], Uniforms]


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def uses_model(name: str) -> bool:
    """Whether the draft model should read prompts for that strategy: its file sets USES_MODEL."""
    return bool(getattr(_module(name), "USES_MODEL", False))


def make(name: str, materials: Materials) -> Drafter:
    """Make a drafter. Raises OptionError for an unknown name or if `materials` lack something."""
    drafter: Drafter = _module(name).make(materials)
    return drafter


def _module(name: str) -> ModuleType:
    path = f"{__name__}.{name}"
    if path not in sys.modules and name not in names():  # names() takes 0.1 ms
        raise OptionError(f"there is no drafter {name!r}; choose from {', '.join(names())}")
    return importlib.import_module(path)
