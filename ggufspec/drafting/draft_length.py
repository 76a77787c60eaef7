"""Decides how far to draft in each round, from the cost model and what is known of acceptance.

The rule within a round, token by token, is native/draft_length.h's; README.md has the whole method.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple, Protocol

from ggufspec import _native
from ggufspec.common import defaults
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants
from ggufspec.drafting.cost_model import CostModel

# By the numbers of native/draft_length.h's Stop.
STOP_REASONS = (
    "",
    "the maximum draft length is reached",
    "the draft is unlikely to be accepted so far",
    "the draft model is uncertain about the next token",
)
TEXT_ENDS = "the text ends with the next token"
MEASURING_PLAIN = "plain decoding is being measured"
UNMEASURED = "the draft model has not been measured yet"
NO_GAIN = "drafting would not be faster"


class AcceptancePrior(NamedTuple):
    """The acceptance model before a text: see AcceptanceModel in native/draft_length.h.

    probability = 1 / (1 + exp(-(intercept + slope * gap))), with `gap` the difference of the draft
    model's two largest logits. `weight`: observations that this counts as; `memory`: observations
    after which one has lost most of its weight.
    """

    intercept: float
    slope: float
    weight: float = constants.PRIOR_WEIGHT
    memory: float = constants.GREEDY_MEMORY


class Action(Enum):
    """What the draft model is to do in a round."""

    DRAFT = auto()
    PROBE = auto()  # read the last tokens, and report how well it would have predicted them
    SKIP = auto()
    PLAIN = auto()  # the same, and nothing else may be drafted


class PrefixLength(NamedTuple):
    """How many tokens of an existing draft to verify.

    `expected`: accepted tokens, on average; `beats_model`: what follows forced tokens promises more
    than drafting there with the draft model.
    """

    n_draft: int
    expected: float
    beats_model: bool


class LengthPolicy(Protocol):
    """Decides how far to draft. A drafter asks it, drafts, and reports the result.

    `rule` is asked for each further token of the draft model: should_evaluate (run the model?) and,
    given the logit gap, should_draw (draw from its distribution?).
    """

    rule: _native.LengthRule

    @property
    def why(self) -> str:
        """Why the round's draft is no longer."""
        ...

    @property
    def expected(self) -> float | None:
        """How many of the drawn tokens are accepted, on average; None: unknown."""
        ...

    def start_round(self, n_max: int, n_unread: int) -> Action:
        """A round of at most `n_max` drafted tokens starts: what does the draft model do?

        `n_unread`: tokens that the draft model has not read yet. After a PROBE, ask again.
        """
        ...

    def prefix_length(self, probs: Sequence[float], forced: Sequence[float] = ()) -> PrefixLength:
        """How much to use of a draft that already exists, such as an n-gram match.

        `probs`: for each token, its acceptance probability if those before it are accepted;
        `forced`: the same of the forced tokens before them.
        """
        ...

    def observe_verdict(self, n_accepted: int, acceptances: Iterable[float]) -> None:
        """The target has judged a draft of the draft model.

        `acceptances`: for each distribution that the draft model computed, the probability that a
        token from it is accepted if those before it are, from both models' distributions.
        """
        ...

    def observe_probe(self, gaps: Sequence[float], acceptances: Sequence[float]) -> None:
        """A probe found, for each token, the draft's logit gap and its acceptance probability."""
        ...

    def observe_round(self, round_: Round) -> None:
        """A round has ended: learn what it cost. Called after observe_verdict, for every round."""
        ...

    def set_n_sharers(self, n_sharers: int) -> None:
        """The next target pass is shared by so many texts."""
        ...

    def advice(self) -> str | None:
        """What to change if this pair's draft does not pay; None if it does."""
        ...


class FixedLength:
    """Drafts as many tokens as allowed, in every round."""

    why = ""
    expected = None

    def __init__(self) -> None:
        self.rule = _native.LengthRule()
        self._n_rounds, self._n_accepted = 1, 1  # of the draft model

    def start_round(self, n_max: int, n_unread: int) -> Action:
        self.rule.start(n_max)
        return Action.DRAFT if n_max > 0 else Action.SKIP

    def prefix_length(self, probs: Sequence[float], forced: Sequence[float] = ()) -> PrefixLength:
        return _prefix_length(self.rule, probs, forced, self._n_accepted / self._n_rounds)

    def observe_verdict(self, n_accepted: int, acceptances: Iterable[float]) -> None:
        self._n_rounds += 1
        self._n_accepted += n_accepted

    def observe_probe(self, gaps: Sequence[float], acceptances: Sequence[float]) -> None:
        pass

    def observe_round(self, round_: Round) -> None:
        pass

    def set_n_sharers(self, n_sharers: int) -> None:
        pass

    def advice(self) -> str | None:
        return None


class AutoLength:
    """The length with the highest expected tokens per second; 0 if drafting would not be faster."""

    def __init__(
        self,
        costs: CostModel,
        prior: AcceptancePrior,
        *,
        is_measured: bool,
        has_model: bool = True,
        block_bonus: float = 0.0,
    ) -> None:
        """`prior` is of the draft model, if there is one (`has_model`).

        `is_measured`: the prior was learned with this pair. Otherwise the draft model is probed
        first with tokens that the target wrote alone: that costs next to nothing even if it is
        always wrong. `block_bonus`: see native/draft_length.h; a value above 0 is learned further.
        """
        self.costs = costs
        self.rule = _native.LengthRule(*prior, block_bonus)
        self.n_observed = 0  # tokens that the acceptance model has learned from
        self._block_bonus = block_bonus
        self._bonus_sum, self._bonus_weight = 0.0, constants.BLOCK_BONUS_WEIGHT
        self._gaps: deque[float] = deque(maxlen=constants.N_GAPS)
        self._is_measured, self._has_model = is_measured, has_model
        self._n_max = defaults.N_DRAFT_LIMIT if is_measured else 1  # until one was accepted
        self._n_rounds = self._n_since_plain = self._n_without_gain = 0
        self._n_until_update = 0
        self._seconds = 0.0
        self.probe_seconds = 0.0  # spent on probes, estimated
        self._recent_tokens = self._recent_seconds = 0.0
        self._n_sharers = 1
        self._curve: Sequence[float] = ()  # as the rule has it
        # Of the current round.
        self._skipped = ""
        self._n_unread = self._n_probed = 0

    @property
    def why(self) -> str:
        return self._skipped or STOP_REASONS[self.rule.stop]

    @property
    def expected(self) -> float | None:
        return self.rule.expected

    # Decisions.

    def start_round(self, n_max: int, n_unread: int) -> Action:
        self._n_unread = n_unread
        self._update_if_due()
        self.rule.start(min(n_max, self._n_max))
        self._skipped = self._reason_to_skip(n_max)
        if not self._skipped:
            return Action.DRAFT
        if self._skipped == MEASURING_PLAIN:
            return Action.PLAIN
        return Action.PROBE if n_max and self._should_probe() else Action.SKIP

    def _reason_to_skip(self, n_max: int) -> str:
        if n_max == 0:
            return TEXT_ENDS
        if self._should_measure_plain():
            return MEASURING_PLAIN
        if not self._is_measured:
            return UNMEASURED
        return "" if self.rule.drafts else NO_GAIN

    def _should_measure_plain(self) -> bool:
        costs = self.costs
        if costs.is_frozen or self._n_sharers > 1:
            return False
        if costs.n_measured(1) < constants.N_PLAIN:
            return True
        is_due = self._n_since_plain >= constants.PLAIN_EVERY
        return is_due and self.rule.rate * costs.plain < constants.SMALL_SPEED_UP

    def _should_probe(self) -> bool:
        if self._n_unread < defaults.N_PROBED:
            return False
        if not self._is_measured:
            return True
        if self.rule.drafts:
            return False
        seconds = self.costs.step + self._n_unread * self.costs.read
        return self.probe_seconds + seconds <= constants.PROBE_SHARE * self._seconds

    def prefix_length(self, probs: Sequence[float], forced: Sequence[float] = ()) -> PrefixLength:
        self.rule.start(0)
        self._skipped = ""
        self._update_if_due()
        if not (probs or forced) or self._should_measure_plain():
            return PrefixLength(0, 0.0, beats_model=False)
        is_known = self._has_model and self._is_measured
        plain_gain = self.rule.prefix_length([])[1]
        model_gain = self.rule.gain - plain_gain if is_known else 0.0
        return _prefix_length(self.rule, probs, forced, model_gain)

    # Observations.

    def observe_verdict(self, n_accepted: int, acceptances: Iterable[float]) -> None:
        # Only the regression of the bonus needs what lies behind the first rejected token.
        known = list(islice(acceptances, None if self._block_bonus else n_accepted + 1))
        gaps = self.rule.gaps
        # The probabilities have less variance than the number of accepted tokens.
        self.rule.observe(known[: n_accepted + 1])
        self.n_observed += min(len(gaps), n_accepted + 1)
        self._learn_block_bonus(n_accepted, known[: self.rule.n_drawn - self.rule.n_taken])
        self._gaps.extend(gaps)
        if n_accepted:
            self._n_max = defaults.N_DRAFT_LIMIT

    def _learn_block_bonus(self, n_accepted: int, acceptances: Sequence[float]) -> None:
        """Linear regression of what judging a draft as a whole accepts beyond its tokens alone."""
        if not self._block_bonus:
            return
        reached, token_wise, further = 1.0, 0.0, 0.0
        for n, acceptance in enumerate(acceptances):
            reached *= acceptance
            token_wise += reached
            further += n * reached
        self._bonus_weight += further**2
        self._bonus_sum += further * (n_accepted - token_wise)
        prior = constants.BLOCK_BONUS_WEIGHT * self._block_bonus
        found = (prior + self._bonus_sum) / self._bonus_weight
        self.rule.block_bonus = min(max(found, 0.0), constants.MAX_BLOCK_BONUS)

    def observe_probe(self, gaps: Sequence[float], acceptances: Sequence[float]) -> None:
        for gap, acceptance in zip(gaps, acceptances, strict=True):
            self.rule.observe_token(gap, acceptance)
        self._n_probed, self._is_measured = self._n_unread, True
        self.n_observed += len(gaps)
        self._gaps.extend(gaps)
        self._update()

    def observe_round(self, round_: Round) -> None:
        self._observe_costs(round_)
        costs, n_drafted, n_evaluated = self.costs, round_.n_drafted, self.rule.n_evaluated
        curve = self._curve or costs.per_text(self._n_sharers)
        seconds = curve[min(n_drafted, len(curve) - 1)]
        if n_evaluated:
            seconds += n_evaluated * costs.step
        self._seconds += seconds
        # Expected tokens, not accepted ones: luck does not repeat in the next rounds.
        keep = constants.RECENT_KEEP
        self._recent_tokens = keep * self._recent_tokens + 1 + (round_.expected or 0.0)
        self._recent_seconds = keep * self._recent_seconds + seconds
        self._n_since_plain = self._n_since_plain + 1 if n_drafted else 0
        self._n_rounds += 1
        self._n_without_gain += self._skipped == NO_GAIN and self._n_sharers == 1
        self._n_until_update -= 1

    def _observe_costs(self, round_: Round) -> None:
        costs, n_drafted, n_evaluated = self.costs, round_.n_drafted, self.rule.n_evaluated
        if self._n_probed:
            if not n_evaluated:  # else the time is that of the probe and of draft steps
                costs.observe_reading(self._n_probed, round_.draft_seconds)
            self.probe_seconds += self._n_probed * costs.read
            self._n_probed = 0
        elif n_evaluated and self._n_unread <= constants.N_UNREAD_USUAL and not self.rule.n_taken:
            costs.observe_draft(n_evaluated, round_.draft_seconds)
        if round_.n_sharers == 1:
            seconds = round_.target_seconds + round_.verify_seconds
            costs.observe_target(n_drafted + 1, seconds)
            follows_plain = self._n_rounds > 0 and not self._n_since_plain
            if follows_plain and not n_drafted:
                costs.observe_plain(seconds)

    def set_n_sharers(self, n_sharers: int) -> None:
        # Other texts must not change a text with a seed.
        if n_sharers != self._n_sharers and not self.costs.is_frozen:
            self._n_sharers = n_sharers
            self._recent_tokens = self._recent_seconds = 0.0
            self._n_until_update = 0

    def advice(self) -> str | None:
        n_skipped, n_rounds, curve = self._n_without_gain, self._n_rounds, self.costs.curve
        if n_skipped < max(constants.N_ADVICE, constants.ADVICE_SHARE * n_rounds):
            return None
        if self.costs.draft_cannot_pay:
            return (
                f"drafting cannot help: one draft token costs {self.costs.step / curve[0]:.2f}x a "
                "target pass, too much even if all are accepted. Use a smaller draft, give it more "
                "of the GPU (-ngld), or leave it out"
            )
        gaps = self._recent_gaps()
        acceptance = self.rule.acceptance(gaps[len(gaps) // 2])
        return (
            f"drafting did not help: {acceptance:.0%} of draft tokens would be accepted, but "
            f"verifying 2 tokens costs {curve[1] / curve[0]:.1f}x a pass over one; "
            f"{n_skipped} of {n_rounds} rounds skipped drafting"
        )

    # The rule.

    def _update_if_due(self) -> None:
        if self._n_until_update <= 0:
            self._update()

    def _update(self) -> None:
        is_early = self._n_rounds < constants.N_EARLY
        self._n_until_update = constants.UPDATE_EVERY_EARLY if is_early else constants.UPDATE_EVERY
        gaps = self._recent_gaps() if self._has_model else [-math.inf]
        n, n_levels = len(gaps), constants.N_GAP_LEVELS
        levels = [gaps[(2 * k + 1) * n // (2 * n_levels)] for k in range(n_levels)]  # mid-quantiles
        self._curve = self.costs.per_text(self._n_sharers)
        min_rate = 1 / (self.costs.plain if self._n_sharers == 1 else self._curve[0])
        if self._recent_seconds:
            recent_rate = self._recent_tokens / self._recent_seconds
            min_rate = max(min_rate, constants.RECENT_RATE_MARGIN * recent_rate)
        self.rule.update(self._curve, self.costs.step, levels, min_rate)

    def _recent_gaps(self) -> Sequence[float]:
        """The draft model's last logit gaps, sorted."""
        few = len(self._gaps) < constants.N_OWN_GAPS
        return sorted([*self._gaps, *constants.PRIOR_GAPS] if few else self._gaps)


def _prefix_length(
    rule: _native.LengthRule, probs: Sequence[float], forced: Sequence[float], model_gain: float
) -> PrefixLength:
    """`model_gain`: of drafting with the draft model, compared with drafting nothing."""
    n_draft, gain, expected = rule.prefix_length([*forced, *probs])
    further_gain = gain - rule.prefix_length(forced)[1]
    beats_model = n_draft > len(forced) and further_gain > math.prod(forced) * model_gain
    return PrefixLength(n_draft, expected, beats_model)
