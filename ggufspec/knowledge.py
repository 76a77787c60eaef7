"""What has been learned of a pair on this machine: costs of passes, and how often its drafts stand.

Knows how one generation learns from another; no models, no files.
"""

from __future__ import annotations

from collections.abc import Mapping

from ggufspec.costs import Costs
from ggufspec.pace import Chosen, Line

# Of a pair that nobody has seen: at even logits the draft is right as often as not.
_FIRST_LINE = Line(0.4, 2.0, 12.0)
_N_ENOUGH = 30  # lessons after which a text says something of the next


class Knowledge:
    """Costs and chances of a pair. A generation takes its `pace` from here, and brings it back."""

    def __init__(self, costs: Costs, lines: Mapping[str, Line] | None = None) -> None:
        self.costs = costs
        self._lines = dict(lines or {})
        # What a text with a seed begins from, so that the same seed gives the same text.
        self._first_costs, self._first_lines = costs.copy(), dict(self._lines)

    @property
    def has_costs(self) -> bool:
        """Whether a text can be repeated: its costs are not to be measured while it is written."""
        return self._first_costs.n_measured(1) > 0

    def settle(self) -> None:
        """From now on, texts with a seed begin from what is known now."""
        self._first_costs, self._first_lines = self.costs.copy(), dict(self._lines)

    def pace(self, temperature: float, *, repeats: bool) -> Chosen:
        """How far to draft in a text; one that `repeats` begins from what was settled."""
        lines = self._first_lines if repeats else self._lines
        costs = self._first_costs.copy() if repeats else self.costs
        costs.is_frozen = repeats
        line = lines.get(_kind(temperature))
        return Chosen(costs, line or _FIRST_LINE, is_known=line is not None)

    def keep(self, pace: Chosen, temperature: float) -> None:
        """A text has ended: what did it teach?"""
        if pace.n_lessons >= _N_ENOUGH and not pace.costs.is_frozen:
            self._lines[_kind(temperature)] = Line(*pace.native.line, _FIRST_LINE.weight)

    def to_document(self) -> dict[str, object]:
        """For JSON: see of_document."""
        lines = {kind: [line.at_zero, line.slope] for kind, line in sorted(self._lines.items())}
        return {"costs": self.costs.to_document(), "chances": lines}

    @staticmethod
    def of_document(document: Mapping[str, object], n_most: int) -> Knowledge:
        """Raises ValueError where it is not one."""
        costs, lines = document.get("costs"), document.get("chances", {})
        if not isinstance(costs, Mapping) or not isinstance(lines, Mapping):
            raise ValueError("no costs, or no chances")
        return Knowledge(
            Costs.of_document(costs, n_most), {str(kind): _line(of) for kind, of in lines.items()}
        )


def _kind(temperature: float) -> str:
    """Texts by how they are drawn: at another temperature, drafts stand less or more often."""
    return f"{temperature:.1f}"


def _line(numbers: object) -> Line:
    if not isinstance(numbers, list) or len(numbers) != 2:
        raise ValueError(f"{numbers!r} is no line")
    at_zero, slope = (float(number) for number in numbers)
    if not (abs(at_zero) < 100 and 0 <= slope < 100):
        raise ValueError(f"{numbers!r} is no line")
    return Line(at_zero, slope, _FIRST_LINE.weight)
