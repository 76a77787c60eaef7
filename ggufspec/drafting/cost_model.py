"""Measures the seconds that target passes and draft steps take on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ggufspec import _native
from ggufspec.drafting import constants


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


class CostModel(_native.CostModel):
    """Seconds of target passes (with verification) by number of tokens, and of draft steps."""

    def __init__(
        self, n_most: int, n_sharers: int = 1, start: Start | None = None, n_per_step: int = 1
    ) -> None:
        """`n_sharers`: maximum number of texts in a pass, each with at most `n_most` tokens.

        `start`: see Start; None: usual CPU costs. `n_per_step`: tokens that the draft model
        predicts in one step.
        """
        super().__init__(constants, n_most, n_sharers, n_per_step, start)
        self.start = start

    def drafting(self, n_tokens: int) -> float:
        """Seconds of the draft steps that compute `n_tokens` distributions."""
        return math.ceil(n_tokens / self.n_per_step) * self.step

    @property
    def draft_cannot_pay(self) -> bool:
        """Whether drafting is slower than plain decoding even if every token is accepted."""
        rounds = enumerate(self.curve[1 : self.n_most], 1)  # (n drafted tokens, seconds)
        return all(self.drafting(n) + seconds >= (n + 1) * self.plain for n, seconds in rounds)

    @property
    def is_plausible(self) -> bool:
        """Whether no measured size is far from between one token's seconds and n times these."""
        sizes, factor = self.sizes, constants.MAX_DEVIATION
        one = sizes.get(1, 0.0)
        return all(one / factor <= each <= n * one * factor for n, each in sizes.items())

    def resized(
        self, n_most: int, n_sharers: int = 1, start: Start | None = None, n_per_step: int = 1
    ) -> CostModel:
        """A copy for passes of other sizes, with the measurements that fit them."""
        made = CostModel(n_most, n_sharers, start, n_per_step)
        made.take(self)
        return made

    def resized_as(self, other: CostModel) -> CostModel:
        return self.resized(other.n_most, other.n_sharers, other.start, other.n_per_step)

    def as_measured(self) -> CostModel:
        """A copy in which the expected seconds of all sizes, and of drafting, count as measured."""
        made = CostModel(self.n_most, self.n_sharers, n_per_step=self.n_per_step)
        made.restore(dict(enumerate(self.curve, 1)), self.plain_measured, self.step, self.read)
        return made

    def to_document(self) -> dict[str, object]:
        """The measurements as JSON, which `of_document` reads."""
        return {
            "target_seconds": {str(n): seconds for n, seconds in self.sizes.items()},
            "plain_seconds": self.plain_measured,
            "draft_seconds": self.step_measured,
            "draft_read_seconds": self.read_measured,
        }

    @staticmethod
    def of_document(document: Mapping[str, object]) -> CostModel:
        """The costs in a document, with any `n_most`: see `resized`. Raises ValueError."""
        measured = document.get("target_seconds")
        if not isinstance(measured, Mapping) or not measured:
            raise ValueError("there are no target_seconds")
        sizes = {_size(key): _checked(each) for key, each in measured.items()}
        if 1 not in sizes:
            raise ValueError("there are no target_seconds of one token")
        costs = CostModel(max(sizes))
        costs.restore(
            sizes,
            _checked(document.get("plain_seconds", 0), or_zero=True),
            _checked(document.get("draft_seconds"), or_zero=True),
            _checked(document.get("draft_read_seconds"), or_zero=True),
        )
        return costs


def _size(key: object) -> int:
    text = str(key)
    if text.isdecimal() and len(text) <= constants.MAX_SIZE_DIGITS and int(text) > 0:
        return int(text)
    raise ValueError(f"target_seconds has {text[:40]!r}, which is not a number of tokens")


def _checked(value: object, *, or_zero: bool = False) -> float:
    least = 0 if or_zero else constants.MIN_SECONDS
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and least <= value < constants.MAX_SECONDS:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ValueError(f"{str(value)[:40]!r} cannot be the seconds of a pass")
