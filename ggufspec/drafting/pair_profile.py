"""What has been learned of a pair on this machine: costs of passes, and how often its drafts stand.

Knows how one generation learns from another; no models, no clocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ggufspec.drafting import profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import AutoLength, Line

# Of a pair that nobody has seen. The likeliest token is mostly right where the draft is sure, and
# right as often as not where it is not; what is drawn stands nearly as often anywhere.
_GREEDY_LINE = Line(0.4, 2.0, 12.0)
_SAMPLED_LINE = Line(0.8, 0.6, 12.0, memory=300.0)
# What block verification keeps beyond token-wise chances. Found with the embedded pair: 0.12, 0.20,
# 0.32 and 0.41 tokens more in rounds of 3, 4, 5 and 6 at temperature 1, 0.15, 0.27 in those of 3
# and 5 at 0.7.
_BLOCK_BONUS = 0.07
_N_PASSES = 48  # after which what they cost is worth to be remembered
_N_ENOUGH = 8  # lessons after which a text says something of the next


class PairProfile:
    """Costs and acceptance of a pair. Each generation takes its `policy` from here."""

    def __init__(
        self, costs: CostModel, lines: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        self.costs = costs
        self._lines = dict(lines or {})
        # What a text with a seed begins from, so that the same seed gives the same text.
        self._first_costs, self._first_lines = costs.copy(), dict(self._lines)
        self._is_remembered = costs.n_measured(1) > 0

    @property
    def is_settled(self) -> bool:
        """Whether it is known what texts with a seed begin from."""
        return self._first_costs.n_measured(1) > 0

    @property
    def is_new(self) -> bool:
        """Whether there is something to remember that was not known at first."""
        if self._is_remembered:
            return len(self._lines) > len(self._first_lines)
        return self.is_settled or self.costs.n_passes >= _N_PASSES

    def settle(self, costs: CostModel) -> None:
        """Texts with a seed begin from these costs from now on."""
        self._first_costs = costs
        if not self.costs.n_measured(1):
            self.costs = costs.copy()

    def policy(
        self, temperature: float, *, repeats: bool, in_blocks: bool, has_model: bool = True
    ) -> AutoLength:
        """How far to draft in a text; one that `repeats` begins from what was settled.

        in_blocks: drafts are judged as a whole.
        """
        lines = self._first_lines if repeats else self._lines
        costs = self._first_costs.copy() if repeats else self.costs
        costs.is_frozen = repeats
        line = lines.get(_kind(temperature))
        guess = _SAMPLED_LINE if temperature > 0 else _GREEDY_LINE
        if line is not None:
            guess = guess._replace(at_zero=line[0], slope=line[1])
        bonus = _BLOCK_BONUS if in_blocks and temperature > 0 else 0.0
        return AutoLength(costs, guess, is_known=line is not None, has_model=has_model, bonus=bonus)

    def keep(self, policy: AutoLength, temperature: float) -> None:
        """A text has ended: what did it teach?"""
        if policy.n_lessons >= _N_ENOUGH and not policy.costs.is_frozen:
            self._lines[_kind(temperature)] = policy.native.line

    def to_document(self) -> dict[str, object]:
        """For JSON: see of_document. What was known at first stays as it was.

        So a seed gives the same text in the next process, and in the one after it.
        """
        costs = self._first_costs if self.is_settled else self.costs
        lines = {**self._lines, **self._first_lines}
        return {
            "costs": costs.to_document(),
            "chances": {kind: list(line) for kind, line in sorted(lines.items())},
        }

    @staticmethod
    def of_document(document: Mapping[str, object], n_most: int, n_sharers: int = 1) -> PairProfile:
        """Raises ValueError where it is not one. n_most, n_sharers: see CostModel."""
        costs, lines = document.get("costs"), document.get("chances", {})
        if not isinstance(costs, Mapping) or not isinstance(lines, Mapping):
            raise ValueError("no costs, or no chances")
        return PairProfile(
            CostModel.of_document(costs, n_most, n_sharers),
            {str(kind): _line(of) for kind, of in lines.items()},
        )


class StoredProfile:
    """What is known of a pair from one process to the next, under the facts that it depends on."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts = facts

    def recall(self, n_most: int, n_sharers: int = 1) -> PairProfile | None:
        """What is remembered, for passes as CostModel has them; None where nothing is."""
        document = profile_store.recall(self._facts)
        try:
            if document is None:
                return None
            return PairProfile.of_document(document, n_most, n_sharers)
        except ValueError:
            return None

    def remember(self, profile: PairProfile) -> None:
        """Keep it, where that is possible."""
        document = profile.to_document()
        before = profile_store.recall(self._facts) or {}
        known = before.get("costs")
        if isinstance(known, Mapping) and self.recall(1):
            document["costs"] = known  # with the sizes that this engine was not loaded for
        profile_store.remember(self._facts, document)


def _kind(temperature: float) -> str:
    """Texts by how they are drawn: at another temperature, drafts stand less or more often."""
    return f"{temperature:.1f}"


def _line(numbers: object) -> tuple[float, float]:
    if not isinstance(numbers, list) or len(numbers) != 2:
        raise ValueError(f"{numbers!r} is no line")
    at_zero, slope = numbers
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"{numbers!r} is no line")
    if not (abs(at_zero) < 100 and 0 <= slope < 100):
        raise ValueError("a line that steep, or that far off, is no line")
    return float(at_zero), float(slope)
