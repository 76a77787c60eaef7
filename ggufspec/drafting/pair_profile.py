"""Keeps a pair's costs and acceptance on this machine, from text to text."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType

from ggufspec.drafting import constants, profile_store
from ggufspec.drafting.acceptance import Acceptance, Coefficients
from ggufspec.drafting.account import Account
from ggufspec.drafting.cost_model import CostModel, Start
from ggufspec.drafting.draft_length import LengthPolicy

_GREEDY = (constants.GREEDY_INTERCEPT, constants.GREEDY_SLOPE)
_SECOND_GREEDY = (constants.SECOND_GREEDY_INTERCEPT, constants.SECOND_GREEDY_SLOPE)
_SAMPLED = (constants.SAMPLED_INTERCEPT, constants.SAMPLED_SLOPE)
_SECOND_SAMPLED = (constants.SECOND_SAMPLED_INTERCEPT, constants.SECOND_SAMPLED_SLOPE)


def fixed_length(temperature: float, *, in_blocks: bool = False) -> LengthPolicy:
    """A policy that drafts a fixed number of tokens, also as a tree, from a new pair's priors."""
    return LengthPolicy(
        prior=_new(temperature),
        memory=_memory(temperature),
        block_bonus=_bonus(temperature, in_blocks),
    )


class PairProfile:
    """Costs and acceptance of a pair; makes the length policy of each text.

    Texts with a seed start from the settled costs, which are measured before the first such text,
    and from a new pair's priors and account, so that the same seed gives the same text. All other
    texts start from the latest measurements.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: Mapping[str, Acceptance] | None = None,
        settled: CostModel | None = None,
        account: Account | None = None,
    ) -> None:
        """`acceptance`: by temperature, written as by `_key`. `settled`: None: not yet measured.

        `account`: None: a new pair's account.
        """
        self.costs = costs
        self.account = account or Account()
        self._acceptance = dict(acceptance or {})
        self._settled = settled
        self._is_settled_anew = False
        self._n_stored_passes = costs.n_passes

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has set the costs that texts with a seed start from."""
        return self._settled is not None

    @property
    def is_new(self) -> bool:
        """Whether there are new measurements to store."""
        n_passes = self.costs.n_passes - self._n_stored_passes
        return self._is_settled_anew or n_passes >= constants.N_PASSES_TO_REMEMBER

    def settle(self, measured: CostModel) -> None:
        """Let texts with a seed start from these measurements from now on.

        `measured` may cover fewer tokens and fewer texts per pass than this profile's costs.
        """
        costs = self.costs
        self._settled = measured.resized(costs.n_most, costs.n_sharers, n_per_step=costs.n_per_step)
        self._is_settled_anew = True
        if not costs.n_measured(1):
            self.costs = measured.resized(
                costs.n_most, costs.n_sharers, costs.start, costs.n_per_step
            )

    def policy(
        self, temperature: float, *, repeats: bool, in_blocks: bool, has_model: bool = True
    ) -> LengthPolicy:
        """The length policy of one text.

        `repeats`: the text has a seed: it starts from the settled costs and learns no costs.
        `in_blocks`: drafts are verified as a whole. `has_model`: there is a draft model.
        """
        costs = _copy(self._settled or self.costs) if repeats else self.costs
        costs.is_frozen = repeats
        new = _new(temperature)
        known = None if repeats else self._acceptance.get(_key(temperature))
        return LengthPolicy(
            costs,
            Acceptance(*map(_faded, known or new, new)),
            memory=_memory(temperature),
            has_model=has_model,
            block_bonus=_bonus(temperature, in_blocks),
            account=Account() if repeats else self.account,
        )

    def keep(self, policy: LengthPolicy, temperature: float) -> None:
        """Keep what the policy of an ended text has learned about acceptance, if it learns."""
        if policy.has_model and not policy.costs.is_frozen:
            self._acceptance[_key(temperature)] = policy.acceptance

    def to_document(self) -> dict[str, object]:
        """The profile as JSON, which `of_document` reads."""
        settled = {"settled_costs": self._settled.to_document()} if self._settled else {}
        return {
            **settled,
            "costs": self.costs.to_document(),
            "balances": self.account.balances,
            "acceptance": {
                key: list(map(list, each)) for key, each in sorted(self._acceptance.items())
            },
        }

    @staticmethod
    def of_document(
        document: Mapping[str, object],
        n_most: int,
        n_sharers: int = 1,
        start: Start | None = None,
        n_per_step: int = 1,
    ) -> PairProfile:
        """The profile in a document. Raises ValueError. The other arguments: see CostModel."""
        costs, acceptance = document.get("costs"), document.get("acceptance", {})
        settled, balances = document.get("settled_costs"), document.get("balances")
        if not (
            isinstance(costs, Mapping)
            and isinstance(settled, (Mapping, NoneType))
            and isinstance(acceptance, Mapping)
        ):
            raise ValueError("it needs the objects costs and acceptance")
        return PairProfile(
            CostModel.of_document(costs).resized(n_most, n_sharers, start, n_per_step),
            {str(key): _acceptance(each) for key, each in acceptance.items()},
            None
            if settled is None
            else CostModel.of_document(settled).resized(n_most, n_sharers, None, n_per_step),
            None if balances is None else Account.of_document(balances),
        )


class StoredProfile:
    """A pair's profile on disk, stored under the facts that it depends on.

    `facts`: None: nothing is stored. `start`, `n_per_step`: see CostModel. `assumed`: stored with
    the profile: see engine.speeds.Predicted.
    """

    def __init__(
        self,
        facts: Mapping[str, object] | None = None,
        start: Start | None = None,
        assumed: Mapping[str, object] | None = None,
        n_per_step: int = 1,
    ) -> None:
        self._n_per_step = n_per_step
        self.facts = facts
        self.assumed = dict(assumed or {})
        self._start = start

    def profile(self, n_most: int, n_sharers: int = 1) -> PairProfile:
        """The stored profile, or else a new one, for passes of this size: see CostModel."""
        new = PairProfile(CostModel(n_most, n_sharers, self._start, self._n_per_step))
        return self.recall(n_most, n_sharers) or new

    def recall(self, n_most: int, n_sharers: int = 1) -> PairProfile | None:
        """The stored profile; None if there is no valid one."""
        if self.facts is None or (document := profile_store.recall(self.facts)) is None:
            return None
        try:
            return PairProfile.of_document(
                document, n_most, n_sharers, self._start, self._n_per_step
            )
        except ValueError:
            return None

    def remember(self, profile: PairProfile) -> None:
        """Store the profile, if it has new measurements and the cache folder can be written.

        Stored settled costs are never replaced, so a seed gives the same text in every process.
        """
        if self.facts is None or not profile.is_new:
            return
        document = {**profile.to_document(), "assumed_seconds": self.assumed}
        known = self.recall(constants.MAX_STORED_SIZE)
        if known is not None and known.is_settled:
            document["settled_costs"] = known.to_document()["settled_costs"]
        profile_store.remember(self.facts, document)


def _new(temperature: float) -> Acceptance:
    """The acceptance model of a new pair."""
    if temperature > 0:
        return Acceptance(_SAMPLED, _SAMPLED, _SECOND_SAMPLED)
    return Acceptance(_GREEDY, _GREEDY, _SECOND_GREEDY)


def _memory(temperature: float) -> float:
    return constants.SAMPLED_MEMORY if temperature > 0 else constants.GREEDY_MEMORY


def _bonus(temperature: float, in_blocks: bool) -> float:
    return constants.BLOCK_BONUS if in_blocks and temperature > 0 else 0.0


def _copy(costs: CostModel) -> CostModel:
    return costs.resized(costs.n_most, costs.n_sharers, costs.start, costs.n_per_step)


def _faded(known: Coefficients, new: Coefficients) -> Coefficients:
    """The known coefficients, moved towards a new pair's: the next text may be easier to draft."""
    share = constants.FORGOTTEN_SHARE
    intercept, slope = (k + share * (n - k) for k, n in zip(known, new, strict=True))
    return intercept, slope


def _key(temperature: float) -> str:
    """The key of a temperature's acceptance model: acceptance depends on the temperature."""
    return f"{temperature:.1f}"


def _acceptance(lists: object) -> Acceptance:
    # Files written before there were trees have two models.
    if isinstance(lists, list) and 2 <= len(lists) <= len(Acceptance._fields):
        return Acceptance(*map(_coefficients, lists))
    raise ValueError(f"{str(lists)[:40]} is not a list of acceptance models")


def _coefficients(numbers: object) -> Coefficients:
    if isinstance(numbers, list) and len(numbers) == 2:
        intercept, slope = numbers
        if all(isinstance(number, (int, float)) for number in numbers):
            most = constants.MAX_COEFFICIENT
            if abs(intercept) < most and 0 <= slope < most:
                return float(intercept), float(slope)
    raise ValueError(
        f"{str(numbers)[:40]} cannot be the intercept and slope of an acceptance model"
    )
