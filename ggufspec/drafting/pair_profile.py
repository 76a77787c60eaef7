"""Keeps a pair's costs and acceptance on this machine, from text to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from ggufspec.drafting import constants, profile_store
from ggufspec.drafting.acceptance import Acceptance, Account, Coefficients
from ggufspec.drafting.cost_model import CostModel, Start
from ggufspec.drafting.draft_length import LengthPolicy

_GREEDY = (constants.GREEDY_INTERCEPT, constants.GREEDY_SLOPE)
_SECOND_GREEDY = (constants.SECOND_GREEDY_INTERCEPT, constants.SECOND_GREEDY_SLOPE)
_SAMPLED = (constants.SAMPLED_INTERCEPT, constants.SAMPLED_SLOPE)


def fixed_length(temperature: float, *, in_blocks: bool = False) -> LengthPolicy:
    """A policy that drafts a fixed number of tokens, also as a tree, from a new pair's priors."""
    return LengthPolicy(None, _new(temperature), **_options(temperature, in_blocks))


class PairProfile:
    """Costs and acceptance of a pair; makes the length policy of each text.

    Texts with a seed start from the settled costs, which are measured before the first such text,
    and from a new pair's priors and account, so that the same seed gives the same text. All other
    texts start from the latest measurements.
    """

    def __init__(
        self, costs: CostModel, acceptance: Mapping[str, Acceptance] | None = None
    ) -> None:
        """`acceptance`: by temperature, written as by `_key`."""
        self.costs = costs
        self.account = Account()
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
        return all(costs.is_plausible for costs in (self.costs, self._settled) if costs)

    @property
    def is_new(self) -> bool:
        """Whether there are new measurements to store."""
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
        new, costs, account = _new(temperature), self.costs, self.account
        known = self._acceptance.get(_key(temperature), new)
        if repeats:
            costs, account, known = self._settled or costs, Account(), new
            costs = costs.resized_as(costs)
        costs.is_frozen = repeats
        return LengthPolicy(
            costs,
            Acceptance(*map(_faded, known, new)),
            has_model=has_model,
            account=account,
            **_options(temperature, in_blocks),
        )

    def keep(self, policy: LengthPolicy, temperature: float) -> None:
        """Keep what the policy of an ended text has learned about acceptance, if it learns."""
        if policy.has_model and not policy.costs.is_frozen:
            self._acceptance[_key(temperature)] = policy.acceptance

    def to_document(self) -> dict[str, object]:
        """The profile as JSON, which `of_document` reads: its costs are those of all threads."""
        self.costs.use(0)
        costs: dict[str, object] = {}
        if self.costs.n_measured(1):
            costs["costs"] = self.costs.to_document()
        if self._settled:
            costs["settled_costs"] = self._settled.to_document()
            costs["is_settled_disturbed"] = self.is_settled_disturbed
        return {
            **costs,
            "balances": self.account.balances,
            "acceptance": {
                key: list(map(list, each)) for key, each in sorted(self._acceptance.items())
            },
        }

    @staticmethod
    def of_document(document: Mapping[str, object], like: CostModel) -> PairProfile:
        """The profile in a document, for passes of the sizes that `like` has. Raises ValueError."""
        costs, acceptance = document.get("costs"), document.get("acceptance", {})
        settled, balances = document.get("settled_costs"), document.get("balances")
        if not (
            isinstance(costs, (Mapping, NoneType))
            and isinstance(settled, (Mapping, NoneType))
            and isinstance(acceptance, Mapping)
            and (costs or settled)
        ):
            raise ValueError("it needs the objects costs or settled_costs, and acceptance")
        new = CostModel(like.n_most, like.n_sharers, like.start, like.n_per_step)
        profile = PairProfile(
            new if costs is None else CostModel.of_document(costs).resized_as(like),
            {str(key): _acceptance(each) for key, each in acceptance.items()},
        )
        if settled is not None:
            known = CostModel.of_document(settled)
            profile.is_settled_disturbed = document.get("is_settled_disturbed") is True
            profile._settled = known.resized(
                like.n_most, like.n_sharers, n_per_step=like.n_per_step
            )
        if balances is not None:
            found = _two_numbers(balances, "two balances", constants.MAX_SECONDS)
            profile.account = Account([min(each, constants.MAX_BALANCE) for each in found])
        return profile


@dataclass(frozen=True)
class StoredProfile:
    """A pair's profile on disk, stored under the facts that it depends on.

    `facts`: None: nothing is stored. `start`, `n_per_step`: see CostModel. `assumed`: stored with
    the profile: see engine.speeds.PairCosts.
    """

    facts: Mapping[str, object] | None = None
    start: Start | None = None
    assumed: Mapping[str, object] = field(default_factory=dict)
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
        document = {**profile.to_document(), "assumed_seconds": self.assumed}
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


def _new(temperature: float) -> Acceptance:
    """The acceptance model of a new pair."""
    if temperature > 0:
        return Acceptance(_SAMPLED, _SAMPLED)
    return Acceptance(_GREEDY, _GREEDY, _SECOND_GREEDY)


def _options(temperature: float, in_blocks: bool) -> dict[str, Any]:
    """Further arguments of LengthPolicy."""
    if temperature > 0:
        bonus = constants.BLOCK_BONUS if in_blocks else 0.0
        return {"memory": constants.SAMPLED_MEMORY, "block_bonus": bonus}
    return {"memory": constants.GREEDY_MEMORY}


def _faded(known: Coefficients, new: Coefficients) -> Coefficients:
    """The known coefficients, moved towards a new pair's: the next text may be easier to draft."""
    share = constants.FORGOTTEN_SHARE
    intercept, slope = (k + share * (n - k) for k, n in zip(known, new, strict=True))
    return intercept, slope


def _key(temperature: float) -> str:
    """The key of a temperature's acceptance model: acceptance depends on the temperature."""
    return f"{temperature:.1f}"


def _acceptance(lists: object) -> Acceptance:
    what, most = "the intercept and slope of an acceptance model", constants.MAX_COEFFICIENT
    # Files written before there were trees have two models.
    if isinstance(lists, list) and 2 <= len(lists) <= len(Acceptance._fields):
        made = Acceptance(*(_two_numbers(each, what, most) for each in lists))
        if all(slope >= 0 for _, slope in made):
            return made
    raise ValueError(f"{str(lists)[:40]} is not a list of acceptance models")


def _two_numbers(found: object, what: str, most: float) -> tuple[float, float]:
    """Two numbers from JSON with absolute values below `most`. Raises ValueError."""
    if isinstance(found, list) and len(found) == 2:
        first, second = found
        if all(isinstance(each, (int, float)) and abs(each) < most for each in found):
            return float(first), float(second)
    raise ValueError(f"{str(found)[:40]} cannot be {what}")
