"""Measures the seconds that target passes and draft steps take on this machine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from ggufspec.drafting import constants


class Start(NamedTuple):
    """Seconds known before generation; their proportions stand in for sizes not yet measured.

    `target`: passes over 1, 2 ... tokens, up to the largest pass. `step`: a draft step. `read`:
    each further token that the draft model reads in a batch. `is_measured`: True if measured with
    these models on this machine, False if predicted; `guesses_step`: `step` is a guess even so.

    If measured, a size's first pass, which may be disturbed, changes them no more than later ones.
    If predicted, they are limited to usual CPU costs, since drafts that seem too slow would never
    be tried, and a size's first pass, in which a device may compile its program, is not measured.
    """

    target: Sequence[float]
    step: float
    read: float
    is_measured: bool = False
    guesses_step: bool = False


class _Size(NamedTuple):
    """A number of tokens whose passes were measured."""

    seconds: float  # divided by CostModel._scale
    n_measured: int
    at: int  # CostModel.n_passes at the latest one


class CostModel:
    """Seconds of target passes (with verification) by number of tokens, and of draft steps.

    Unmeasured sizes are interpolated; an unmeasured multiple of four is assumed to cost no more
    than the size below it, because CPU kernels compute four rows at a time.
    """

    def __init__(
        self, n_most: int, n_sharers: int = 1, start: Start | None = None, n_per_step: int = 1
    ) -> None:
        """`n_sharers`: maximum number of texts in a pass, each with at most `n_most` tokens.

        `start`: see Start; None: usual CPU costs. `n_per_step`: tokens that the draft model
        predicts in one step.
        """
        self.n_most, self.n_sharers, self.n_per_step = n_most, n_sharers, n_per_step
        self.start = start
        self._positions = array("d")  # made when it is needed: see _positions
        self._warm: set[int] = set()  # sizes of passes run so far on the device; 0: a draft step
        self.is_frozen = False  # if so, measurements are ignored
        self.n_passes = 0  # measured
        self._sizes: dict[int, _Size] = {}
        self._scale = 1.0  # follows the machine's drift
        self._plain, self._n_plain = 0.0, 0
        self._step, self._n_steps, self._step_at = 0.0, 0, 0
        self._read = 0.0
        self._curve: list[float] | None = None

    @property
    def _n_largest(self) -> int:
        return self.n_most * self.n_sharers

    # Measurements.

    def observe_target(self, n_tokens: int, seconds: float) -> None:
        """Learn that a pass over `n_tokens` took `seconds`, with verification."""
        if self.is_frozen or not 1 <= n_tokens <= self._n_largest or not seconds > 0:
            return
        if self._is_compiled_for(n_tokens):
            return
        known, count = self._sizes.get(n_tokens), self.n_measured(n_tokens)
        if known is None:
            # A pass over n tokens takes no longer than n single-token passes, unless disturbed.
            one = self._sizes.get(1)
            new = min(seconds, n_tokens * self._scale * one.seconds) if one else seconds
            if self._is_measured_before and one:
                new = _updated(self.curve[n_tokens - 1], new, count)
        else:
            old = self._scale * known.seconds
            new = _updated(old, seconds, count)
            if count >= 2:  # the whole machine may have become slower or faster
                self._scale *= (new / old) ** constants.DRIFT_SHARE
        self.n_passes += 1
        self._sizes[n_tokens] = _Size(new / self._scale, count + 1, self.n_passes)
        self._curve = None

    def observe_plain(self, seconds: float) -> None:
        """Learn that a single-token pass after another single-token pass took `seconds`.

        After a larger batch it is slower: llama.cpp plans its graph again at each change of size.
        """
        if not self.is_frozen and seconds > 0:
            known = self._plain
            self._plain = _updated(known, seconds, self._n_plain) if known else seconds
            self._n_plain += 1

    def observe_draft(self, n_steps: int, seconds: float, n_further: int = 0) -> None:
        """Learn that `n_steps` draft steps in sequence took `seconds` in total.

        The first step also read `n_further` tokens besides its own.
        """
        if self.is_frozen or n_steps < 1 or not seconds > 0:
            return
        if self._is_compiled_for(0):
            return
        if not self._n_steps:  # divided between steps and reading in the usual proportion
            n_beside = self._usual_read * n_further if self.n_per_step == 1 else 0.0
            self._step, known = seconds / (n_steps + n_beside), self.step
            if self._knows_step_before and self._sizes:
                self._step = _updated(known, self._step, 0)
        if self.n_per_step > 1 and n_further <= constants.FEW_BESIDE_BLOCK:
            each = max(seconds - n_further * self._read, 0.0) / n_steps
            self._step = _updated(self._step, each, self._n_steps)
        elif n_further:
            read = max(seconds - n_steps * self._step, 0.0) / n_further
            read = min(read, self._step)
            rate = 1 - (1 - constants.COST_LEARNING_RATE) ** n_further
            self._read += (read - self._read) * rate if self._read else read
        else:
            each = seconds / n_steps
            self._step = _updated(self._step, each, self._n_steps)
        self._n_steps += 1
        self._step_at = self.n_passes

    def _is_compiled_for(self, n_tokens: int) -> bool:
        """True on the device's first pass of this size: it may have compiled its program."""
        is_first = n_tokens not in self._warm
        self._warm.add(n_tokens)
        return is_first and self.start is not None and not self.start.is_measured

    @property
    def _is_measured_before(self) -> bool:
        return self.start is not None and self.start.is_measured

    @property
    def _knows_step_before(self) -> bool:
        return self._is_measured_before and self.start is not None and not self.start.guesses_step

    # Queries.

    def n_measured(self, n_tokens: int) -> int:
        """How many passes over `n_tokens` were measured."""
        return self._sizes[n_tokens].n_measured if n_tokens in self._sizes else 0

    @property
    def curve(self) -> Sequence[float]:
        """Seconds of a pass over 1, 2 ... n_most * n_sharers tokens, measured or assumed."""
        if self._curve is None:
            self._curve = self._interpolated()
        return self._curve

    def per_text(self, n_sharers: int) -> Sequence[float]:
        """Seconds attributed to 1, 2 ... n_most tokens of one text in a pass of `n_sharers` texts.

        The larger of two prices: an equal share of a pass in which all texts have that many tokens,
        and the price of adding the tokens to a pass in which every other text has one token.
        """
        curve = self.curve
        if n_sharers == 1:
            return curve[: self.n_most]
        last = len(curve) - 1
        plain = curve[min(n_sharers - 1, last)]
        return [
            max(
                curve[min(n_sharers * n - 1, last)] / n_sharers,
                plain / n_sharers + curve[min(n_sharers + n - 2, last)] - plain,
            )
            for n in range(1, self.n_most + 1)
        ]

    @property
    def plain(self) -> float:
        """Seconds per token without drafting."""
        return min(self._plain or self.curve[0], self.curve[0])

    @property
    def knows_draft(self) -> bool:
        """Whether a draft step was measured."""
        return self._n_steps > 0 or self._knows_step_before

    @property
    def step(self) -> float:
        """Seconds of a draft step, in which the draft model reads one token."""
        if not self._n_steps:
            share = self.start.step / self.start.target[0] if self.start else math.inf
            most = math.inf if self._is_measured_before else constants.UNMEASURED_STEP
            return min(share, most) * self.curve[0]
        return self._step * _discount(self.n_passes - self._step_at, self._n_steps)

    def drafting(self, n_tokens: int) -> float:
        """Seconds of the draft steps that compute `n_tokens` distributions."""
        return math.ceil(n_tokens / self.n_per_step) * self.step

    @property
    def read(self) -> float:
        """Seconds that the draft model takes for each token that it reads in a batch."""
        return self._read or self._usual_read * self.step

    @property
    def _usual_read(self) -> float:
        """Assumed value of `read`, in draft steps, before it is measured."""
        start = self.start
        if start and start.step:
            return start.read / start.step
        return constants.UNMEASURED_READ / self.n_per_step

    @property
    def draft_cannot_pay(self) -> bool:
        """Whether drafting is slower than plain decoding even if every token is accepted."""
        rounds = enumerate(self.curve[1 : self.n_most], 1)  # (n drafted tokens, seconds)
        return all(self.drafting(n) + seconds >= (n + 1) * self.plain for n, seconds in rounds)

    # Copies.

    def resized(
        self, n_most: int, n_sharers: int = 1, start: Start | None = None, n_per_step: int = 1
    ) -> CostModel:
        """A copy for passes of other sizes, with the measurements that fit them."""
        made = copy(self)
        made.n_most, made.n_sharers, made.n_per_step = n_most, n_sharers, n_per_step
        made.start, made._positions = start, array("d")
        made._sizes = {n: size for n, size in self._sizes.items() if n <= made._n_largest}
        made.is_frozen, made._curve = False, None
        return made

    def resized_as(self, other: CostModel) -> CostModel:
        return self.resized(other.n_most, other.n_sharers, other.start, other.n_per_step)

    def to_document(self) -> dict[str, object]:
        """The measurements as JSON, which `of_document` reads."""
        return {
            "target_seconds": {
                str(n): self._scale * size.seconds for n, size in sorted(self._sizes.items())
            },
            "plain_seconds": self._plain,
            "draft_seconds": self._step,
            "draft_read_seconds": self._read,
        }

    @staticmethod
    def of_document(document: Mapping[str, object]) -> CostModel:
        """The costs in a document, with any `n_most`: see `resized`. Raises ValueError."""
        measured = document.get("target_seconds")
        if not isinstance(measured, Mapping) or not measured:
            raise ValueError("there are no target_seconds")
        # As if they had been measured just now, twice.
        sizes = {_size(key): _Size(_checked(each), 2, 0) for key, each in measured.items()}
        if 1 not in sizes:
            raise ValueError("there are no target_seconds of one token")
        costs = CostModel(max(sizes))
        costs._sizes = sizes
        costs._plain = _checked(document.get("plain_seconds", 0), or_zero=True)
        costs._n_plain = 2 if costs._plain else 0
        costs._step = _checked(document.get("draft_seconds"), or_zero=True)
        costs._n_steps = 2 if costs._step else 0
        costs._read = _checked(document.get("draft_read_seconds"), or_zero=True)
        return costs

    # Interpolation.

    def _interpolated(self) -> list[float]:
        known = sorted(self._sizes.items())
        sizes = [n for n, _ in known] or [1]
        seconds = [
            self._scale * size.seconds * _discount(self.n_passes - size.at, size.n_measured)
            for _, size in known
        ] or [1.0]
        at = self._positions = self._positions or _positions(self.start, self._n_largest)
        first, last = sizes[0], sizes[-1]
        one = seconds[0] / (1 + constants.UNMEASURED_SLOPE * (at[first] - 1))
        slope = constants.UNMEASURED_SLOPE * one
        if last > 1:
            slope = max((seconds[-1] - one) / (at[last] - 1), 0.0)
        if first > 1:
            sizes, seconds = [1, *sizes], [one, *seconds]
        if last < len(at) - 1:
            sizes.append(len(at) - 1)
            seconds.append(seconds[-1] + slope * (at[-1] - at[last]))
        curve: list[float] = np.interp(at[1:], [at[n] for n in sizes], seconds).tolist()
        measured, rows = self._sizes, constants.KERNEL_ROWS
        for n in range(rows, len(curve) + 1, rows):
            if n not in measured:
                below = [curve[k - 1] for k in range(n - rows + 2, n) if k in measured]
                if below:
                    curve[n - 1] = min(curve[n - 1], max(below))
        return curve


def _positions(start: Start | None, n_largest: int) -> array[float]:
    """A coordinate for each number of tokens; interpolation is linear in it.

    Without `start` it is the number of tokens; with `start`, it rises as the seconds of `start` do.
    """
    if start is None:
        return array("d", range(n_largest + 1))
    found = array("d", [0.0, 1.0])
    for n, seconds in enumerate(start.target[1:n_largest], 2):
        more = (seconds / start.target[0] - 1) / constants.UNMEASURED_SLOPE
        found.append(max(min(1 + more, n), found[-1] + constants.LEAST_DISTANCE))
    return found


def _discount(age: int, count: int) -> float:
    """Factor on the seconds of a size measured `count` times, most recently `age` passes ago.

    The measurement may have been disturbed: discounting it causes another try. A size measured
    often is discounted more slowly, because each try costs a round.
    """
    stale = age - constants.N_FRESH_PASSES
    if stale <= 0:
        return 1.0
    n_first = constants.N_FIRST_MEASUREMENTS
    least = constants.MIN_DISCOUNT if count >= n_first else constants.MIN_DISCOUNT_OF_FEW
    return max(1 - constants.DISCOUNT_PER_PASS * stale * n_first / max(count, n_first), least)


def _updated(old: float, new: float, count: int) -> float:
    """An exponential moving average; a faster one of the first measurements replaces it, because
    first passes are often slow."""
    if new < old and count < constants.N_FIRST_MEASUREMENTS:
        return new
    return old + (min(new, constants.OUTLIER * old) - old) * constants.COST_LEARNING_RATE


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
