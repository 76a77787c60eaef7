"""Reports how far to draft in each round, and why: native/draft_length.h decides."""

from __future__ import annotations

from ggufspec import _native
from ggufspec.common.failures import log_failure
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants
from ggufspec.drafting.cost_model import CostModel

Action = _native.Action
PrefixLength = _native.PrefixLength
Coefficients = tuple[float, float]  # intercept and slope of AcceptanceModel

# Indexed by native/draft_length.h's Stop.
STOP_REASONS = (
    "",
    "the maximum draft length is reached",
    "the draft is unlikely to be accepted so far",
    "the draft model is uncertain about the next token",
    "the text ends with the next token",
    "plain decoding is being measured",
    "the draft model has failed",
    "drafting would not be faster",
    "reading the text with the draft model would take longer than drafting saves",
    "the drafts of this pair have cost more than they saved",
)


class LengthPolicy(_native.LengthPolicy):
    """Decides how far to draft in each round of a text: see native/draft_length.h.

    A drafter calls `start_round` or `prefix_length`, drafts, and reports the result. For each
    further token of the draft model it calls `should_evaluate` (run the model?) and, with the
    logit gap, `should_draw` (draw from its distribution?).
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        prior: Coefficients | None = None,
        second: Coefficients = constants.SECOND_SAMPLED,
        *,
        known: Coefficients | None = None,
        has_model: bool = True,
        block_bonus: float = 0.0,
    ) -> None:
        """`costs`: None: the length is fixed. `prior`: acceptance of a new pair, by a model's logit
        gap; `known`: the one that the text starts from. Unused without a draft model (`has_model`).

        A fixed length without `prior` learns nothing, which is enough for chains. `second`:
        acceptance of the draft model's second choice after a rejected first one, by the gap of the
        remaining tokens. `block_bonus`: see native/stopping_rule.h.
        """
        self.learns = prior is not None
        prior = prior or (0.0, 0.0)
        super().__init__(costs, prior, known or prior, block_bonus, has_model)
        self.second = _native.AcceptanceModel(*second)
        self.failure = ""  # of the draft model, which then drafts no more

    @property
    def why(self) -> str:
        """Why the round's draft was not longer; empty if its length is fixed."""
        return "" if self.is_fixed and not self.failure else STOP_REASONS[self.stop]

    @property
    def expected(self) -> float | None:
        """Expected number of accepted tokens; None: unknown."""
        return None if self.is_fixed else self.n_expected

    def observe_round(self, round_: Round) -> None:
        """Learn what a round cost. Called after every round, after any observe_verdict."""
        seconds = round_.target_seconds and round_.target_seconds + round_.verify_seconds
        n_tokens, n_sharers = len(round_.tokens), round_.n_sharers
        self.observe_seconds(n_tokens, round_.n_drafted, n_sharers, round_.draft_seconds, seconds)

    def give_up(self, error: Exception) -> None:
        """The draft model has failed: the rest of the text is written without it."""
        self.failure = " ".join(str(error).split())
        self.give_up_model()
        log_failure("the draft model has failed, and the text goes on without it", error)

    def advice(self) -> str | None:
        """What to change if this pair's draft failed or does not pay; None if it does."""
        if self.failure:
            return (
                f"the draft model has failed ({self.failure}), and the rest of the text was "
                "written without it. If it fails again, choose another one, or give it more memory"
            )
        n_skipped, n_rounds, costs = self.n_without_gain, self.n_rounds, self.costs
        if costs is None or n_skipped < max(constants.N_ADVICE, constants.ADVICE_SHARE * n_rounds):
            return None
        curve = costs.curve
        if costs.draft_cannot_pay:
            what = "draft token" if costs.n_per_step == 1 else "block of draft tokens"
            return (
                f"drafting cannot help: one {what} costs {costs.step / curve[0]:.2f}x a "
                "target pass, too much even if all are accepted. Use a smaller draft, give it more "
                "of the GPU (-ngld), or leave it out"
            )
        if self.mean_observed >= 0:
            found = f"{self.mean_observed:.0%} of draft tokens were accepted"
        else:
            found = f"an estimated {self.mean_acceptance:.0%} of draft tokens would be accepted"
        sizes = [n for n in constants.ADVICE_SIZES if n <= len(curve)]
        shown = ", ".join(f"{n}: {curve[n - 1] / curve[0]:.1f}" for n in sizes)
        return (
            f"drafting did not help: {found}; passes over more tokens cost, in passes over one, "
            f"{shown}; {n_skipped} of {n_rounds} rounds skipped drafting"
        )
