"""What is known of a pair on this machine: its costs and its acceptance, between texts."""

from __future__ import annotations

from collections.abc import Mapping

from ggufspec.drafting import constants, profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import AcceptancePrior, AutoLength


class PairProfile:
    """Costs and acceptance of a pair. Each text takes its length policy from here."""

    def __init__(
        self, costs: CostModel, acceptance: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        """`acceptance`: (intercept, slope) by temperature, as `_key` writes it."""
        self.costs = costs
        self._acceptance = dict(acceptance or {})
        # Texts with a seed start from these, so that the same seed gives the same text.
        self._first_costs, self._first_acceptance = _copy(costs), dict(self._acceptance)
        self._is_remembered = costs.n_measured(1) > 0

    @property
    def is_settled(self) -> bool:
        """Whether texts with a seed have costs to start from."""
        return self._first_costs.n_measured(1) > 0

    @property
    def is_new(self) -> bool:
        """Whether there is something to store that was unknown at first."""
        if self._is_remembered:
            return len(self._acceptance) > len(self._first_acceptance)
        return self.is_settled or self.costs.n_passes >= constants.N_PASSES_TO_REMEMBER

    def settle(self, measured: CostModel) -> None:
        """Texts with a seed start from these measurements from now on.

        They may cover fewer tokens, and fewer texts a pass, than this profile's costs do.
        """
        self._first_costs = measured.resized(self.costs.n_most, self.costs.n_sharers)
        if not self.costs.n_measured(1):
            self.costs = _copy(self._first_costs)

    def policy(
        self, temperature: float, *, repeats: bool, in_blocks: bool, has_model: bool = True
    ) -> AutoLength:
        """The length policy of one text.

        repeats: the text has a seed, starts from what was settled and learns no costs. in_blocks:
        drafts are verified as a whole. has_model: there is a draft model.
        """
        costs = _copy(self._first_costs) if repeats else self.costs
        costs.is_frozen = repeats
        weight = constants.PRIOR_WEIGHT
        prior = AcceptancePrior(
            constants.GREEDY_INTERCEPT, constants.GREEDY_SLOPE, weight, constants.GREEDY_MEMORY
        )
        if temperature > 0:
            prior = AcceptancePrior(
                constants.SAMPLED_INTERCEPT,
                constants.SAMPLED_SLOPE,
                weight,
                constants.SAMPLED_MEMORY,
            )
        known = (self._first_acceptance if repeats else self._acceptance).get(_key(temperature))
        if known is not None:
            prior = prior._replace(intercept=known[0], slope=known[1])
        return AutoLength(
            costs,
            prior,
            is_measured=known is not None,
            has_model=has_model,
            block_bonus=constants.BLOCK_BONUS if in_blocks and temperature > 0 else 0.0,
        )

    def keep(self, policy: AutoLength, temperature: float) -> None:
        """A text has ended: keep what its policy learned about acceptance."""
        if policy.n_observed >= constants.N_TO_KEEP and not policy.costs.is_frozen:
            self._acceptance[_key(temperature)] = policy.rule.coefficients

    def to_document(self) -> dict[str, object]:
        """For JSON: see of_document. What was known at first stays as it was.

        So a seed gives the same text in the next process, and in the one after it.
        """
        costs = self._first_costs if self.is_settled else self.costs
        acceptance = {**self._acceptance, **self._first_acceptance}
        return {
            "costs": costs.to_document(),
            "chances": {key: list(each) for key, each in sorted(acceptance.items())},
        }

    @staticmethod
    def of_document(document: Mapping[str, object], n_most: int, n_sharers: int = 1) -> PairProfile:
        """Raises ValueError if it is not one. n_most, n_sharers: see CostModel."""
        costs, acceptance = document.get("costs"), document.get("chances", {})
        if not isinstance(costs, Mapping) or not isinstance(acceptance, Mapping):
            raise ValueError("it needs the objects costs and chances")
        return PairProfile(
            CostModel.of_document(costs, n_most, n_sharers),
            {str(key): _coefficients(each) for key, each in acceptance.items()},
        )


class StoredProfile:
    """A pair's profile on disk, under the facts that it depends on."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        self._facts = facts

    def recall(self, n_most: int, n_sharers: int = 1) -> PairProfile | None:
        """The stored profile, for passes as CostModel has them; None if there is none."""
        document = profile_store.recall(self._facts)
        if document is None:
            return None
        try:
            return PairProfile.of_document(document, n_most, n_sharers)
        except ValueError:
            return None

    def remember(self, profile: PairProfile) -> None:
        """Store it, if possible."""
        document = profile.to_document()
        before = profile_store.recall(self._facts) or {}
        known = before.get("costs")
        if isinstance(known, Mapping) and self.recall(1):
            document["costs"] = known  # with sizes that this engine was not loaded for
        profile_store.remember(self._facts, document)


def _copy(costs: CostModel) -> CostModel:
    return costs.resized(costs.n_most, costs.n_sharers)


def _key(temperature: float) -> str:
    """Drafts are accepted more or less often at another temperature."""
    return f"{temperature:.1f}"


def _coefficients(numbers: object) -> tuple[float, float]:
    if isinstance(numbers, list) and len(numbers) == 2:
        intercept, slope = numbers
        if all(isinstance(number, (int, float)) for number in numbers):
            most = constants.MAX_COEFFICIENT
            if abs(intercept) < most and 0 <= slope < most:
                return float(intercept), float(slope)
    raise ValueError(
        f"{str(numbers)[:40]} cannot be the intercept and slope of an acceptance model"
    )
