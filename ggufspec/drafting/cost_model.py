"""Stores the seconds that target passes and draft steps take: native/cost_model.h learns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.drafting import constants

_PASS = "the seconds of a pass"


class Start(NamedTuple):
    """Seconds known before generation; their proportions stand in for sizes not yet measured.

    `target`: passes over 1, 2 ... tokens, up to the largest pass. `step`: a draft step. `read`:
    each further token that the draft model reads in a batch. `is_measured`: True if measured with
    these models on this machine, False if predicted; `guesses_step`: the step was not measured.

    If measured, a size's first pass, which may be disturbed, changes them no more than later ones.
    If predicted, they are limited to usual CPU costs, since drafts that seem too slow would never
    be tried, and a size's first pass, in which a device may compile its program, is not measured.
    """

    target: Sequence[float]
    step: float
    read: float
    is_measured: bool = False
    guesses_step: bool = False


# Seconds of target passes (with verification) by number of tokens, and of draft steps.
CostModel = _native.CostModel


def is_plausible(costs: CostModel) -> bool:
    """Whether no measured size is far from between one token's seconds and n times these."""
    sizes, factor = costs.sizes, constants.MAX_DEVIATION
    one = sizes.get(1, 0.0)
    return all(one / factor <= each <= n * one * factor for n, each in sizes.items())


def to_document(costs: CostModel) -> dict[str, object]:
    return {
        "target_seconds": {str(n): seconds for n, seconds in costs.sizes.items()},
        "plain_seconds": costs.plain_measured,
        "draft_seconds": costs.step_measured,
        "draft_read_seconds": costs.read_measured,
    }


def of_document(document: Mapping[str, object]) -> CostModel:
    """The costs in a document, with any `n_most`: see `resized`. Raises ValueError."""
    measured = document.get("target_seconds")
    if not isinstance(measured, Mapping) or not measured:
        raise ValueError("there are no target_seconds")
    sizes = {_size(n): number(each, _PASS, constants.MIN_SECONDS) for n, each in measured.items()}
    if 1 not in sizes:
        raise ValueError("there are no target_seconds of one token")
    costs = CostModel(max(sizes))
    costs.restore(
        sizes,
        number(document.get("plain_seconds", 0), _PASS),
        number(document.get("draft_seconds"), _PASS),
        number(document.get("draft_read_seconds"), _PASS),
    )
    return costs


def _size(key: object) -> int:
    text = str(key)
    if text.isdecimal() and len(text) <= constants.MAX_SIZE_DIGITS and int(text) > 0:
        return int(text)
    raise ValueError(f"target_seconds has {text[:40]!r}, which is not a number of tokens")


def number(
    found: object, what: str, least: float = 0.0, most: float = constants.MAX_SECONDS
) -> float:
    """A number from JSON, from `least` to less than `most`. Raises ValueError."""
    if isinstance(found, (int, float)) and not isinstance(found, bool) and least <= found < most:
        return float(found)
    raise ValueError(f"{str(found)[:40]!r} cannot be {what}")
