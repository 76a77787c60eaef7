"""What is known of a pair on this machine: its costs and its acceptance, between texts."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType

from ggufspec.drafting import constants, profile_store
from ggufspec.drafting.acceptance import Acceptance, Coefficients
from ggufspec.drafting.account import Account
from ggufspec.drafting.cost_model import CostModel, Start
from ggufspec.drafting.draft_length import AutoLength
from ggufspec.drafting.fixed_length import FixedLength

_GREEDY = (constants.GREEDY_INTERCEPT, constants.GREEDY_SLOPE)
_SECOND_GREEDY = (constants.SECOND_GREEDY_INTERCEPT, constants.SECOND_GREEDY_SLOPE)
_SAMPLED = (constants.SAMPLED_INTERCEPT, constants.SAMPLED_SLOPE)
_SECOND_SAMPLED = (constants.SECOND_SAMPLED_INTERCEPT, constants.SECOND_SAMPLED_SLOPE)


def fixed_length(temperature: float, *, in_blocks: bool = False) -> FixedLength:
    """A fixed number of tokens a round, which may be a tree's: it starts as a new pair does."""
    return FixedLength(_new(temperature), _memory(temperature), _bonus(temperature, in_blocks))


class PairProfile:
    """Costs and acceptance of a pair. Each text takes its length policy from here.

    Texts with a seed start from the settled costs, which are measured before the first of them, and
    from the priors and the account of a new pair, so that the same seed gives the same text; all
    others from what was measured last.
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: Mapping[str, Acceptance] | None = None,
        settled: CostModel | None = None,
        account: Account | None = None,
    ) -> None:
        """`acceptance`: by temperature, as `_key` writes it. `settled`: None: not yet measured.

        `account`: None: that of a new pair.
        """
        self.costs = costs
        self.account = account or Account()
        self._acceptance = dict(acceptance or {})
        self._settled = settled
        self._is_settled_anew = False
        self._n_stored_passes = costs.n_passes

    @property
    def is_settled(self) -> bool:
        """Whether texts with a seed have costs to start from: see `settle`."""
        return self._settled is not None

    @property
    def is_new(self) -> bool:
        """Whether there is something to store that was unknown at first."""
        n_passes = self.costs.n_passes - self._n_stored_passes
        return self._is_settled_anew or n_passes >= constants.N_PASSES_TO_REMEMBER

    def settle(self, measured: CostModel) -> None:
        """Texts with a seed start from these measurements from now on.

        They may cover fewer tokens, and fewer texts a pass, than this profile's costs do.
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
    ) -> AutoLength:
        """The length policy of one text.

        repeats: the text has a seed, starts from what was settled and learns no costs. in_blocks:
        drafts are verified as a whole. has_model: there is a draft model.
        """
        costs = _copy(self._settled or self.costs) if repeats else self.costs
        costs.is_frozen = repeats
        new = _new(temperature)
        known = None if repeats else self._acceptance.get(_key(temperature))
        return AutoLength(
            costs,
            Acceptance(*map(_faded, known or new, new)),
            memory=_memory(temperature),
            has_model=has_model,
            block_bonus=_bonus(temperature, in_blocks),
            account=Account() if repeats else self.account,
        )

    def keep(self, policy: AutoLength, temperature: float) -> None:
        """A text has ended: keep what its policy learned about acceptance."""
        if policy.has_model and not policy.costs.is_frozen:
            self._acceptance[_key(temperature)] = policy.acceptance

    def to_document(self) -> dict[str, object]:
        """For JSON: see of_document."""
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
        """Raises ValueError if it is not one. The other arguments: see CostModel."""
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
    """A pair's profile on disk, under the facts that it depends on; without facts, none.

    start, n_per_step: see CostModel. assumed: what is stored beside it: see
    engine.speeds.Predicted.
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
        """The stored profile, or a new one, for passes as CostModel has them."""
        new = PairProfile(CostModel(n_most, n_sharers, self._start, self._n_per_step))
        return self.recall(n_most, n_sharers) or new

    def recall(self, n_most: int, n_sharers: int = 1) -> PairProfile | None:
        """The stored profile; None if there is none."""
        if self.facts is None or (document := profile_store.recall(self.facts)) is None:
            return None
        try:
            return PairProfile.of_document(
                document, n_most, n_sharers, self._start, self._n_per_step
            )
        except ValueError:
            return None

    def remember(self, profile: PairProfile) -> None:
        """Store it, if there is something new, and if it can be written.

        Settled costs stay as they were stored first: so a seed gives the same text in the next
        process, and in the one after it.
        """
        if self.facts is None or not profile.is_new:
            return
        document = {**profile.to_document(), "assumed_seconds": self.assumed}
        known = self.recall(constants.MAX_STORED_SIZE)
        if known is not None and known.is_settled:
            document["settled_costs"] = known.to_document()["settled_costs"]
        profile_store.remember(self.facts, document)


def _new(temperature: float) -> Acceptance:
    """That of a new pair."""
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
    """A little nearer to those of a new pair: other texts may be easier for this draft."""
    share = constants.FORGOTTEN_SHARE
    intercept, slope = (k + share * (n - k) for k, n in zip(known, new, strict=True))
    return intercept, slope


def _key(temperature: float) -> str:
    """Drafts are accepted more or less often at another temperature."""
    return f"{temperature:.1f}"


def _acceptance(lists: object) -> Acceptance:
    # Two: stored before there were trees.
    if isinstance(lists, list) and 2 <= len(lists) <= len(Acceptance._fields):
        return Acceptance(*map(_coefficients, lists))
    raise ValueError(f"{str(lists)[:40]} is no pair of acceptance models")


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
