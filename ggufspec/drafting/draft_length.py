"""Decides how many tokens to draft in each round, from costs and acceptance probabilities."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from ggufspec import _native
from ggufspec.common.failures import log_failure
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants
from ggufspec.drafting.acceptance import Acceptance, Account
from ggufspec.drafting.cost_model import CostModel

# Indexed by native/draft_length.h's Stop.
STOP_REASONS = (
    "",
    "the maximum draft length is reached",
    "the draft is unlikely to be accepted so far",
    "the draft model is uncertain about the next token",
)
TEXT_ENDS = "the text ends with the next token"
MEASURING_PLAIN = "plain decoding is being measured"
NO_GAIN = "drafting would not be faster"
UNREAD = "reading the text with the draft model would take longer than drafting saves"
FAILED = "the draft model has failed"
NO_BALANCE = "the drafts of this pair have cost more than they saved"


class Action(Enum):
    """What to draft in a round."""

    DRAFT = auto()  # run the draft model
    SKIP = auto()  # do not run it; drafts that exist already may be used
    PLAIN = auto()  # draft nothing at all


class PrefixLength(NamedTuple):
    """How many tokens of an existing draft to verify.

    `expected`: expected number of accepted tokens. `beats_model`: after the forced tokens, the
    existing draft has a higher expected gain than drafting with the draft model.
    """

    n_draft: int
    expected: float
    beats_model: bool


class LengthPolicy:
    """Decides how far to draft in each round of a text.

    With costs, it chooses the length with the most expected tokens per second, 0 if drafting is not
    faster. The target's latest logit gaps show how predictable the text is at present, even while
    nothing is drafted. An account limits the time lost to rejected drafts. Without costs
    (`is_fixed`), it drafts as many tokens as each round allows; in a tree, the likeliest ones.

    A drafter calls `start_round` or `prefix_length`, drafts, and reports the result. For each
    further token of the draft model it calls `rule.should_evaluate` (run the model?) and, with the
    logit gap, `rule.should_draw` (draw from its distribution?).
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        prior: Acceptance | None = None,
        *,
        memory: float = constants.GREEDY_MEMORY,
        has_model: bool = True,
        block_bonus: float = 0.0,
        account: Account | None = None,
    ) -> None:
        """`prior`: acceptance that a text starts from; unused without a draft model (`has_model`).

        A fixed length without `prior` learns nothing, which is enough for chains.
        `memory`: number of observations until one has lost most of its weight. `block_bonus`: see
        native/draft_length.h. `account`: None: a new one.
        """
        self.is_fixed = costs is None
        if costs is None:
            costs = CostModel(1)
            costs.is_frozen = True
        self.costs, self.has_model = costs, has_model
        self._learns = prior is not None
        prior, weight = prior or Acceptance((0.0, 0.0), (0.0, 0.0)), constants.PRIOR_WEIGHT
        by_draft = _native.AcceptanceModel(*prior.by_draft, weight, memory)
        self.rule = _native.LengthRule(by_draft, block_bonus)
        self._by_target = _native.AcceptanceModel(*prior.by_target, weight, memory)
        self._before = _native.AcceptanceModel(*prior.by_target)
        # Acceptance of branches whose earlier siblings were all rejected: of the draft model's
        # second choice, by the gap of the remaining tokens.
        self.second = _native.AcceptanceModel(*prior.second, weight, memory)
        # Probability that the draft model's next token is accepted.
        self.mean_acceptance = constants.FIXED_ACCEPTANCE
        self._n_observed, self._sum_observed = 0, 0.0  # number and sum of observed acceptances
        # Rounds that used the draft model, and the tokens they accepted; a first round is assumed.
        self._n_drafts = self._n_accepted = 1
        self._gaps = deque(constants.PRIOR_GAPS, maxlen=constants.N_GAPS)  # the target's
        self._n_rounds = self._n_since_plain = self._n_without_gain = 0
        self.account = account or Account()
        # Tokens of the text so far, its maximum, and tokens since n-grams were last drafted.
        self._n_tokens, self._n_most, self._n_since_free = 0, math.inf, 0
        # Prompt tokens that the draft model had not read when the text began; 0: it has by now.
        self.n_prompt_unread = 0
        self._n_sharers = 1
        self._is_current = False  # whether the rule was updated in this round
        self.failure = ""  # of the draft model, which then drafts no more
        # Facts of the current round.
        self._skipped = ""
        self._n_unread = 1
        self._grown = (0.0, 0, 0)  # arguments of observe_growth

    @property
    def why(self) -> str:
        """Why the round's draft was not longer; empty if its length is fixed."""
        return self._skipped or ("" if self.is_fixed else STOP_REASONS[self.rule.stop])

    @property
    def expected(self) -> float | None:
        """Expected number of accepted tokens; None: unknown."""
        return None if self.is_fixed else self.rule.expected + self._grown[0]

    @property
    def acceptance(self) -> Acceptance:
        """The acceptance model as learned so far."""
        by_draft, by_target = self.rule.acceptance.coefficients, self._by_target.coefficients
        return Acceptance(by_draft, by_target, self.second.coefficients)

    def start_round(self, n_max: int, n_unread: int) -> Action:
        """Start a round of at most `n_max` drafted tokens; returns what the draft model is to do.

        `n_unread`: number of tokens that the draft model has not read yet.
        """
        if self.is_fixed:
            self.rule.start(n_max)
            return Action.DRAFT if n_max > 0 and not self.failure else Action.SKIP
        self._n_unread = n_unread
        if n_unread <= self.n_prompt_unread:
            self.n_prompt_unread = 0
        self._grown = (0.0, 0, 0)
        self._update()
        n_affordable = self._n_affordable([self.mean_acceptance] * n_max, is_free=False)
        if not self.costs.knows_draft:
            n_affordable = min(n_affordable, self.costs.n_per_step)
        self.rule.start(min(n_max, n_affordable))
        self._skipped = self._reason_to_skip(n_max, n_affordable)
        if not self._skipped:
            return Action.DRAFT
        return Action.PLAIN if self._skipped == MEASURING_PLAIN else Action.SKIP

    def _reason_to_skip(self, n_max: int, n_affordable: int) -> str:
        if n_max == 0:
            return TEXT_ENDS
        if self._should_measure_plain():
            return MEASURING_PLAIN
        if self.failure:
            return FAILED
        if not self.rule.drafts:
            return NO_GAIN
        if not self._pays_for_reading():
            return UNREAD
        return "" if n_affordable else NO_BALANCE

    def _n_affordable(self, probs: Sequence[float], *, is_free: bool, is_own: bool = True) -> int:
        costs = self.costs
        reading = 0.0 if self.n_prompt_unread else (self._n_unread - 1) * costs.read
        draft = () if is_free else (reading, costs.step, costs.n_per_step)
        return self.account.n_affordable(
            probs, self.rule, self._plain, *draft, is_free=is_free, is_own=is_own
        )

    def _pays_for_reading(self) -> bool:
        """Whether drafting is expected to save more than reading the unread tokens costs.

        Other texts in the pass wait for it, too.
        """
        saved = self._plain - 1 / self.rule.rate  # per token
        extra = (self._n_unread - 2) * self.costs.read  # two are unread after an accepted draft
        horizon: float = max(self._n_since_free, constants.READING_HORIZON)
        if self.n_prompt_unread and self._n_since_free == self._n_tokens:
            # A prompt is read for the rest of the text. The longer it is, the longer it goes on.
            horizon = max(self.account.length.value - self._n_tokens, horizon)
        return self._n_sharers * extra <= min(horizon, self._n_most - self._n_tokens) * saved

    def _should_measure_plain(self) -> bool:
        costs = self.costs
        if costs.is_frozen or self._n_sharers > 1:
            return False
        if costs.n_measured(1) < constants.N_PLAIN:
            return True
        is_due = self._n_since_plain >= constants.PLAIN_EVERY
        return is_due and self.rule.rate * costs.plain < constants.SMALL_SPEED_UP

    def prefix_length(
        self, probs: Sequence[float], forced: Sequence[float] = (), *, is_own: bool = True
    ) -> PrefixLength:
        """How many tokens to use of a draft that already exists, such as an n-gram match.

        `probs`: of each token, its acceptance probability if the tokens before it are accepted;
        `forced`: of the forced tokens before it. `is_own`: False for drafts from other texts.
        """
        if not self.is_fixed:
            self.rule.start(0)
            self._grown = (0.0, 0, 0)
            self._skipped = ""
            self._update()
            if not (probs or forced) or (not forced and self._should_measure_plain()):
                return PrefixLength(0, 0.0, beats_model=False)
            n_affordable = self._n_affordable([*forced, *probs], is_free=True, is_own=is_own)
            probs = probs[: max(n_affordable - len(forced), 0)]
        rule, n_forced = self.rule, len(forced)
        n_draft, gain, expected = rule.prefix_length([*forced, *probs])
        if n_draft <= n_forced:
            return PrefixLength(n_draft, expected, beats_model=False)
        if not self.has_model:
            model_gain = 0.0
        elif self.is_fixed:
            model_gain = self._n_accepted / self._n_drafts
        else:
            model_gain = rule.gain - rule.prefix_length([])[1]
        further_gain = gain - rule.prefix_length(forced)[1]
        return PrefixLength(n_draft, expected, further_gain > math.prod(forced) * model_gain)

    def step_price(self, n_read: float) -> float:
        """Price of a draft step for a branch, in tokens; `n_read`: further tokens to read."""
        if self.is_fixed or self.costs.n_per_step > 1:
            return 0.0  # costs are not weighed, or the block has been computed already
        return self.rule.rate * (self.costs.step + n_read * self.costs.read)

    def observe_growth(self, value: float, n_steps: int, n_read: int) -> None:
        """Note that branches were added, with an expected number of `value` accepted nodes.

        They took `n_steps` further draft steps, which read `n_read` further tokens.
        """
        is_read = self.costs.n_per_step > 1  # the block of the chain has their distributions
        self._grown = (value, 0, 0) if is_read else (value, n_steps, n_read)

    def observe_gaps(self, gaps: Iterable[float]) -> None:
        """Learn the target's logit gaps at the tokens that a round has added."""
        if self.is_fixed:
            return
        for gap in gaps:
            self._gaps.append(gap)
            # Return to the prior slowly: acceptance may have risen.
            if self._skipped in (NO_GAIN, UNREAD):
                self._by_target.observe(gap, self._before.probability(gap))

    def observe_verdict(
        self, n_accepted: int, acceptances: Iterable[float], target_gaps: Iterable[float]
    ) -> None:
        """Learn from the verdict on a draft of the draft model.

        `acceptances`: for each distribution that the draft model computed, the probability that a
        token drawn from it is accepted if the tokens before it are, from both models'
        distributions. `target_gaps`: the target's logit gap at the same position.
        """
        self._n_drafts += 1
        self._n_accepted += n_accepted
        if not self._learns:
            return
        # Learn from probabilities: they vary less than the number of accepted tokens.
        learned = list(islice(acceptances, n_accepted + 1))
        self.rule.observe(learned)
        self._n_observed += len(learned)
        self._sum_observed += sum(learned)
        if self.is_fixed:
            weight = constants.FIXED_ACCEPTANCE_WEIGHT
            total = weight * constants.FIXED_ACCEPTANCE + self._sum_observed
            self.mean_acceptance = total / (weight + self._n_observed)
            return
        for gap, acceptance in zip(target_gaps, learned, strict=False):
            self._by_target.observe(gap, acceptance)

    def observe_round(self, round_: Round) -> None:
        """Learn what a round cost. Called after every round, after any observe_verdict."""
        if self.is_fixed:
            return
        costs, n_drafted, n_evaluated = self.costs, round_.n_drafted, self.rule.n_evaluated
        _, n_steps, n_read = self._grown
        n_further = self._n_unread - 1 + n_read
        if n_evaluated and not self.rule.n_taken and not self.failure:
            n_all = math.ceil((n_evaluated + n_steps) / costs.n_per_step)
            costs.observe_draft(n_all, round_.draft_seconds, n_further)
        if round_.n_sharers == 1 and round_.target_seconds:
            seconds = round_.target_seconds + round_.verify_seconds
            costs.observe_target(n_drafted + 1, seconds)
            follows_plain = self._n_rounds > 0 and not self._n_since_plain
            if follows_plain and not n_drafted:
                costs.observe_plain(seconds)
        n_tokens, lost = len(round_.tokens), 0.0
        if n_drafted or n_evaluated:
            seconds = costs.of_text(n_drafted + 1, self._n_sharers)
            seconds += costs.drafting(n_evaluated + n_steps)
            if n_evaluated and not self.n_prompt_unread:  # a prompt is read for the whole text
                seconds += n_further * costs.read
            lost = seconds / self._plain - n_tokens
        self.account.observe(n_tokens, -lost, is_free=not n_evaluated)
        self._n_since_free = 0 if n_drafted and not n_evaluated else self._n_since_free + n_tokens
        self._n_since_plain = self._n_since_plain + 1 if n_drafted else 0
        self._n_tokens += n_tokens
        self._n_rounds += 1
        self._n_without_gain += self._skipped in (NO_GAIN, NO_BALANCE) and self._n_sharers == 1
        self._is_current = False

    def give_up_model(self, error: Exception) -> None:
        """The draft model has failed: the rest of the text is written without it."""
        self.failure, self._skipped = " ".join(str(error).split()), FAILED
        self.has_model = self._is_current = False
        log_failure("the draft model has failed, and the text goes on without it", error)

    def set_n_sharers(self, n_sharers: int) -> None:
        """Expect the next target pass to be shared by `n_sharers` texts."""
        # If costs are frozen, the text has a seed: other texts must not change it.
        if n_sharers != self._n_sharers and not self.costs.is_frozen:
            self._n_sharers = n_sharers
            self._is_current = False

    def begin_text(self, n_unread: int, n_most: int) -> bool:
        """Begin a text; returns whether the draft model should read its prompt before the first
        round.

        If not, it does so once that pays. `n_unread`: prompt tokens that it has not read;
        `n_most`: maximum tokens of the text. Always for a fixed length.
        """
        self._n_since_free = self._n_tokens = 0
        self._n_most = n_most
        if self.is_fixed:
            return True
        self._n_unread = self.n_prompt_unread = n_unread
        self._update()
        if self.rule.drafts and self._pays_for_reading():
            self.n_prompt_unread = 0
        return not self.n_prompt_unread

    def advice(self) -> str | None:
        """What to change if this pair's draft failed or does not pay; None if it does."""
        if self.failure:
            return (
                f"the draft model has failed ({self.failure}), and the rest of the text was "
                "written without it. If it fails again, choose another one, or give it more memory"
            )
        n_skipped, n_rounds, curve = self._n_without_gain, self._n_rounds, self.costs.curve
        if n_skipped < max(constants.N_ADVICE, constants.ADVICE_SHARE * n_rounds):
            return None
        if self.costs.draft_cannot_pay:
            what = "draft token" if self.costs.n_per_step == 1 else "block of draft tokens"
            return (
                f"drafting cannot help: one {what} costs {self.costs.step / curve[0]:.2f}x a "
                "target pass, too much even if all are accepted. Use a smaller draft, give it more "
                "of the GPU (-ngld), or leave it out"
            )
        if self._n_observed:
            found = f"{self._sum_observed / self._n_observed:.0%} of draft tokens were accepted"
        else:
            found = f"an estimated {self.mean_acceptance:.0%} of draft tokens would be accepted"
        sizes = [n for n in (2, constants.KERNEL_ROWS) if n <= len(curve)]
        costs = ", ".join(f"{n}: {curve[n - 1] / curve[0]:.1f}" for n in sizes)
        return (
            f"drafting did not help: {found}; passes over more tokens cost, in passes over one, "
            f"{costs}; {n_skipped} of {n_rounds} rounds skipped drafting"
        )

    @property
    def _plain(self) -> float:
        """Seconds per token of this text without drafting."""
        return self.costs.plain_of_text(self._n_sharers)

    def _update(self) -> None:
        if not self._is_current:
            self._is_current = True
            by_target = self._by_target if self.has_model else None
            self.mean_acceptance = self.rule.update(
                self.costs, self._n_sharers, by_target, self._gaps, constants.N_GAP_LEVELS
            )
