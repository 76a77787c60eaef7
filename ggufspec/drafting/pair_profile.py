"""Keeps a pair's costs and acceptance on this machine, from text to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from ggufspec.drafting import constants, cost_model, profile_store
from ggufspec.drafting.cost_model import CostModel, Start
from ggufspec.drafting.draft_length import Coefficients, LengthPolicy


def fixed_length(temperature: float, *, in_blocks: bool = False) -> LengthPolicy:
    """A policy that drafts a fixed number of tokens, also as a tree, from a new pair's priors."""
    return LengthPolicy(None, _new(temperature), **_options(temperature, in_blocks))


class PairProfile:
    """Costs and acceptance of a pair; makes the length policy of each text.

    Texts with a seed start from the settled costs, which are measured before the first such text,
    and from a new pair's priors and balance, so that the same seed gives the same text. All other
    texts start from the latest measurements.
    """

    def __init__(
        self, costs: CostModel, acceptance: Mapping[str, Coefficients] | None = None
    ) -> None:
        """`acceptance`: by temperature, written as by `_key`."""
        self.costs = costs
        self._acceptance = dict(acceptance or {})
        self._settled: CostModel | None = None
        self._is_settled_anew = False
        self.is_settled_disturbed = False  # the settled costs are not to be stored
        self._n_stored_passes = costs.n_passes

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has set the costs that texts with a seed start from."""
        return self._settled is not None

    @property
    def is_plausible(self) -> bool:
        """Whether its costs can be those of one machine: see CostModel."""
        return all(map(cost_model.is_plausible, filter(None, (self.costs, self._settled))))

    @property
    def is_new(self) -> bool:
        n_passes = self.costs.n_passes - self._n_stored_passes
        return self._is_settled_anew or n_passes >= constants.N_PASSES_TO_REMEMBER

    def settle(self, measured: CostModel, *, is_disturbed: bool = False) -> None:
        """Let texts with a seed start from these measurements from now on.

        `measured` may cover fewer tokens and fewer texts per pass than this profile's costs.
        `is_disturbed`: other programs were busy: the measurements serve texts with a seed in this
        process, and are not stored.
        """
        costs = self.costs
        self._settled = measured.resized(costs.n_most, costs.n_sharers, n_per_step=costs.n_per_step)
        self.is_settled_disturbed = is_disturbed
        if is_disturbed:
            return
        self._is_settled_anew = True
        if not costs.n_measured(1):
            self.costs = measured.resized_as(costs)

    def policy(
        self, temperature: float, *, repeats: bool, in_blocks: bool, has_model: bool = True
    ) -> LengthPolicy:
        """The length policy of one text.

        `repeats`: the text has a seed: it starts from the settled costs and learns no costs.
        `in_blocks`: drafts are verified as a whole. `has_model`: there is a draft model.
        """
        costs, known = self.costs, self._acceptance.get(_key(temperature))
        if repeats:
            costs, known = self._settled or costs, None
            costs = costs.resized_as(costs)
        costs.is_frozen = repeats
        how = _options(temperature, in_blocks)
        how |= {"known": known, "has_model": has_model}
        return LengthPolicy(costs, _new(temperature), **how)

    def keep(self, policy: LengthPolicy, temperature: float) -> None:
        """Keep what the policy of an ended text has learned about acceptance, if it learns."""
        if policy.has_model and policy.costs is not None and not policy.costs.is_frozen:
            self._acceptance[_key(temperature)] = policy.acceptance.coefficients

    def to_document(self) -> dict[str, object]:
        """The profile as JSON, which `of_document` reads: its costs are those of all threads."""
        self.costs.use(0)
        costs: dict[str, object] = {}
        if self.costs.n_measured(1):
            costs["costs"] = cost_model.to_document(self.costs)
        if self._settled:
            costs["settled_costs"] = cost_model.to_document(self._settled)
            costs["is_settled_disturbed"] = self.is_settled_disturbed
        return {
            **costs,
            "balance": self.costs.balance,
            "acceptance": {key: list(each) for key, each in sorted(self._acceptance.items())},
        }

    @staticmethod
    def of_document(document: Mapping[str, object], like: CostModel) -> PairProfile:
        """The profile in a document, for passes of the sizes that `like` has. Raises ValueError."""
        costs, acceptance = document.get("costs"), document.get("acceptance", {})
        settled, balance = document.get("settled_costs"), document.get("balance")
        if not (
            isinstance(costs, (Mapping, NoneType))
            and isinstance(settled, (Mapping, NoneType))
            and isinstance(acceptance, Mapping)
            and (costs or settled)
        ):
            raise ValueError("it needs the objects costs or settled_costs, and acceptance")
        new = like.resized_as(like)
        new.restore({}, 0, 0, 0)
        profile = PairProfile(
            new if costs is None else cost_model.of_document(costs).resized_as(like),
            {str(key): _coefficients(each) for key, each in acceptance.items()},
        )
        if settled is not None:
            known = cost_model.of_document(settled)
            profile.is_settled_disturbed = document.get("is_settled_disturbed") is True
            profile._settled = known.resized(
                like.n_most, like.n_sharers, n_per_step=like.n_per_step
            )
        if balance is not None:
            found = cost_model.number(balance, "a balance", -constants.MAX_SECONDS)
            profile.costs.balance = min(found, constants.MAX_BALANCE)
        return profile


@dataclass(frozen=True)
class StoredProfile:
    """A pair's profile on disk, stored under the facts that it depends on.

    `facts`: None: nothing is stored. `start`, `n_per_step`: see CostModel.
    """

    facts: Mapping[str, object] | None = None
    start: Start | None = None
    n_per_step: int = 1

    def profile(self, n_most: int, n_sharers: int = 1) -> PairProfile:
        """The stored profile, or else a new one, for passes of this size: see CostModel."""
        return self.recall(n_most, n_sharers) or PairProfile(self._new_costs(n_most, n_sharers))

    def recall(self, n_most: int, n_sharers: int = 1) -> PairProfile | None:
        """The stored profile; None if there is no valid one."""
        if self.facts is None or (document := profile_store.recall(self.facts)) is None:
            return None
        try:
            found = PairProfile.of_document(document, self._new_costs(n_most, n_sharers))
        except ValueError:
            return None
        return found if found.is_plausible else None

    def remember(self, profile: PairProfile) -> None:
        """Store the profile, if it has new measurements and the cache folder can be written.

        Stored settled costs are never replaced, so a seed gives the same text in every process.
        """
        if self.facts is None or not profile.is_new:
            return
        document = profile.to_document()
        if "costs" not in document:
            return  # all passes had fewer threads
        if document.pop("is_settled_disturbed", False):
            del document["settled_costs"]
        known = self.recall(constants.MAX_STORED_SIZE)
        if known is not None and known.is_settled:
            document["settled_costs"] = known.to_document()["settled_costs"]
        profile_store.remember(self.facts, document)

    def _new_costs(self, n_most: int, n_sharers: int) -> CostModel:
        return CostModel(n_most, n_sharers, self.start, self.n_per_step)


def _new(temperature: float) -> Coefficients:
    return constants.SAMPLED if temperature > 0 else constants.GREEDY


def _options(temperature: float, in_blocks: bool) -> dict[str, Any]:
    if temperature > 0:
        return {"block_bonus": constants.BLOCK_BONUS if in_blocks else 0.0}
    return {"second": constants.SECOND_GREEDY}


def _key(temperature: float) -> str:
    """The key of a temperature's acceptance model: acceptance depends on the temperature."""
    return f"{temperature:.1f}"


def _coefficients(found: object) -> Coefficients:
    what, most = "the intercept and slope of an acceptance model", constants.MAX_COEFFICIENT
    if isinstance(found, list) and len(found) == 2:
        intercept, slope = (cost_model.number(each, what, -most, most) for each in found)
        if slope >= 0:
            return intercept, slope
    raise ValueError(f"{str(found)[:40]} cannot be {what}")
