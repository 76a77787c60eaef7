"""What passes cost on this machine: a staircase over batch sizes. Pure: seconds come in.

Four tokens may cost less than three (kernels of four rows), eight little more than five, and every
device has stairs of its own: nothing is assumed that can be measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

_N_FIRST = 3  # measurements of a size at first: a faster one replaces what was known
_PACE = 0.12  # of a further one, in a mean that forgets
_OUTLIER = 1.7  # a pass that much slower than known was disturbed: it counts as that much
_DRIFT = 0.5  # of what one size is found to have changed, what is believed of the others
_SLOPE = 0.3  # of an unknown machine: what each further token of a batch adds to the cost of one
_N_FRESH = 32  # passes of other sizes after which what one costs is believed less and less:
_DOUBT = 0.001  # of it, with each further pass,
_LEAST_TRUST = 0.88  # down to that much,
_LEAST_OF_FEW = 0.65  # or that, of what was measured once or twice
_LANDING = 4  # rows of weights' kernels: every so many tokens, a stair ends
_HALF = 0.5
_LEAST, _MOST = 1e-9, 1e6  # seconds that a pass may take
_READ = 0.25  # and a token that a draft reads in a batch beside one that it writes
_STEP = 0.08  # likewise: a draft step beside a pass of the target


class CostModel:
    """Seconds of a target pass over 1, 2 ... `n_most` tokens, judged; and of one draft step.

    Sizes that were never measured lie on a line between those that were; but a multiple of four is
    believed to cost no more than what comes just below it, until somebody has tried: there the
    kernels of processors have their landings.
    """

    def __init__(self, n_most: int, n_sharers: int = 1) -> None:
        """`n_sharers`: the most texts that have a pass together, each over `n_most` at most."""
        self.n_most = n_most
        self.n_sharers = n_sharers
        self.is_frozen = False  # measurements then change nothing
        self._known: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self.n_passes = 0  # that were measured
        self._last: dict[int, int] = {}  # pass by which a size was measured
        self._plain = 0.0
        self._n_plain = 0
        self._step = 0.0
        self._n_steps = 0
        self._read = 0.0
        self._curve: list[float] | None = None

    def observe_target(self, n_tokens: int, seconds: float) -> None:
        """A pass over `n_tokens` took that long, with what it takes to judge them."""
        if self.is_frozen or not 1 <= n_tokens <= self._n_largest or not seconds > 0:
            return
        count = self._counts.get(n_tokens, 0)
        old = self._known.get(n_tokens)
        if old is None:
            # No pass takes longer than as many over one token: what does was disturbed.
            self._known[n_tokens] = min(seconds, n_tokens * self._known.get(1, math.inf))
        else:
            new = _blend(old, seconds, count)
            drift = math.sqrt(new / old) if count >= 2 else 1.0
            for n in self._known:
                self._known[n] *= drift
            self._known[n_tokens] = new
        self._counts[n_tokens] = count + 1
        self.n_passes += 1
        self._last[n_tokens] = self.n_passes
        self._curve = None

    def observe_plain(self, seconds: float) -> None:
        """A pass over one token that came after another such took that long.

        Where batches change their size, each pass takes longer: llama.cpp plans it anew.
        """
        if not self.is_frozen and seconds > 0:
            self._plain = _blend(self._plain, seconds, self._n_plain) if self._n_plain else seconds
            self._n_plain += 1

    def observe_draft(self, n_steps: int, seconds: float) -> None:
        """So many draft steps, one after the other, took that long together."""
        if self.is_frozen or n_steps < 1 or not seconds > 0:
            return
        each = seconds / n_steps
        self._step = _blend(self._step, each, self._n_steps) if self._n_steps else each
        self._n_steps += 1

    def observe_reading(self, n_tokens: int, seconds: float) -> None:
        """The draft read `n_tokens` in one batch."""
        if not self.is_frozen and n_tokens >= 1 and seconds > 0:
            self._read = seconds / n_tokens

    def n_measured(self, n_tokens: int) -> int:
        """How often a pass over that many tokens was measured."""
        return self._counts.get(n_tokens, 0)

    @property
    def curve(self) -> Sequence[float]:
        """Seconds of a pass over 1, 2 ... n_most tokens; a guess while nothing was measured.

        And over more, as far as they are known of passes that texts have together.
        """
        if self._curve is None:
            self._curve = self._interpolated()
        return self._curve

    def shared(self, n_sharers: int) -> Sequence[float]:
        """Of passes that so many texts have together, each over 1, 2 ... n_most tokens: a text's
        part of the seconds.
        """
        return [self.part(n, n_sharers) for n in range(1, self.n_most + 1)]

    def part(self, n_tokens: int, n_sharers: int) -> float:
        """The same, of passes over `n_tokens` of each."""
        curve = self.curve
        return curve[min(n_sharers * n_tokens, len(curve)) - 1] / n_sharers

    @property
    def _n_largest(self) -> int:
        return self.n_most * self.n_sharers

    @property
    def plain(self) -> float:
        """Seconds of a token where nothing is ever drafted."""
        return min(self._plain or self.curve[0], self.curve[0])

    @property
    def step(self) -> float:
        """Seconds of a draft step: one more token, one more distribution."""
        return self._step if self._n_steps else _STEP * self.curve[0]

    @property
    def draft_cannot_pay(self) -> bool:
        """Whether a draft step takes more than half of what the target itself takes for a token."""
        return self.step > _HALF * self.curve[0]

    @property
    def read(self) -> float:
        """Seconds that the draft takes for each token that it reads in a batch."""
        return self._read or _READ * self.step

    def to_document(self) -> dict[str, object]:
        """What is known, for JSON: see of_document."""
        return {
            "target_seconds": {str(n): self._known[n] for n in sorted(self._known)},
            "plain_seconds": self._plain,
            "draft_seconds": self._step,
            "draft_read_seconds": self._read,
        }

    @staticmethod
    def of_document(document: Mapping[str, object], n_most: int, n_sharers: int = 1) -> CostModel:
        """The costs of a document. Raises ValueError where it is not one."""
        costs = CostModel(n_most, n_sharers)
        known = document.get("target_seconds")
        if not isinstance(known, Mapping) or not known:
            raise ValueError("no target_seconds")
        for key, seconds in known.items():
            n_tokens = int(key) if str(key).isdecimal() and len(str(key)) < 6 else 0
            if n_tokens < 1:
                raise ValueError(f"{str(key)[:40]!r} are no seconds of a pass: it has no size")
            if n_tokens <= costs._n_largest:
                costs._known[n_tokens] = _seconds(seconds)
                costs._counts[n_tokens] = 2
        if 1 not in costs._known:
            raise ValueError("no target_seconds of one token")
        costs._plain = _seconds(document.get("plain_seconds", 0), or_zero=True)
        costs._n_plain = 2 if costs._plain else 0
        costs._step = _seconds(document.get("draft_seconds"), or_zero=True)
        costs._n_steps = 2 if costs._step else 0
        costs._read = _seconds(document.get("draft_read_seconds"), or_zero=True)
        return costs

    def copy(self) -> CostModel:
        """The same, to be learned from apart."""
        made = CostModel(self.n_most, self.n_sharers)
        made._known, made._counts = dict(self._known), dict(self._counts)
        made._step, made._n_steps, made._read = self._step, self._n_steps, self._read
        made._plain, made._n_plain = self._plain, self._n_plain
        made.n_passes, made._last = self.n_passes, dict(self._last)
        return made

    def _interpolated(self) -> list[float]:
        sizes = sorted(self._known)
        if not sizes:
            sizes, seconds = [1], [1.0]
        else:
            seconds = [self._known[n] * self._trust(n) for n in sizes]
        first, last = sizes[0], sizes[-1]
        one = seconds[0] / (1 + _SLOPE * (first - 1))
        slope = (seconds[-1] - one) / (last - 1) if last > 1 else _SLOPE * one
        if first > 1:
            sizes, seconds = [1, *sizes], [one, *seconds]
        curve = []
        for n in range(1, self._n_largest + 1):
            if n >= last:
                curve.append(seconds[-1] + max(slope, 0.0) * (n - last))
                continue
            i = bisect_right(sizes, n) - 1
            share = (n - sizes[i]) / (sizes[i + 1] - sizes[i])
            curve.append(seconds[i] + share * (seconds[i + 1] - seconds[i]))
        for n in range(_LANDING, self._n_largest + 1, _LANDING):
            below = [curve[k - 1] for k in range(n - _LANDING + 2, n) if k in self._known]
            if below and n not in self._known:
                curve[n - 1] = min(curve[n - 1], max(below))
        return curve

    def _trust(self, n_tokens: int) -> float:
        """What was measured long ago may have been a bad moment: it is worth another try.

        The more often it has been tried, the longer it is believed: each try costs a round.
        """
        age = self.n_passes - self._last.get(n_tokens, self.n_passes)
        count = self._counts.get(n_tokens, 0)
        doubt = _DOUBT * max(age - _N_FRESH, 0) * _N_FIRST / max(count, _N_FIRST)
        return max(1 - doubt, _LEAST_TRUST if count >= _N_FIRST else _LEAST_OF_FEW)


def _blend(old: float, new: float, count: int) -> float:
    """A running mean that forgets; the first measurements of all are often too slow."""
    if new < old and count < _N_FIRST:
        return new
    return old + (min(new, _OUTLIER * old) - old) * _PACE


def _seconds(value: object, *, or_zero: bool = False) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (_LEAST < value < _MOST or (or_zero and value == 0)):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ValueError(f"{str(value)[:40]!r} are no seconds of a pass")
