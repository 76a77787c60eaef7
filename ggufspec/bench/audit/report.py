"""The options, the findings and the verdict of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ggufspec.bench.audit.statistics import Test
from ggufspec.common import defaults, validate
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import OptionError

BATCH_TOLERANCE = 0.01  # largest median distance of batches that never counts as a difference
ROUNDING_FACTOR = 2  # the median distance of batches may exceed that of rounding by this factor
# Largest possible shift of a mean: quantiles lie in [0, 1) with mean 1/2.
LARGEST_SHIFT = 0.5
# The error of a lossless rule is below this plus 3 times the resolution of its integral.
RULE_TOLERANCE = 0.002


@dataclass(frozen=True)
class AuditOptions:
    """What to audit, and how closely. Raises OptionError for invalid values."""

    n_runs: int = defaults.AUDIT_RUNS  # texts of each kind; the prompts are used cyclically
    n_tokens: int = defaults.AUDIT_TOKENS  # maximum tokens of a text; the first is never drafted
    alpha: float = defaults.AUDIT_ALPHA  # probability of a false alarm of all tests together
    near_tie: float = defaults.AUDIT_NEAR_TIE  # divergences up to this logit gap do not count
    seed: int | None = None  # None: a random one
    n_draft: int | str = defaults.N_DRAFT_FIXED  # "auto" drafts less, so it is weaker evidence
    tree: str = defaults.TREE
    verify: str = defaults.VERIFY
    # Other options of `generate`: sampling, a grammar, the draft's temperature.
    options: GenerateOptions = field(default_factory=GenerateOptions)

    def __post_init__(self) -> None:
        for name, least in (("n_runs", 1), ("n_tokens", 2), ("seed", 0)):
            value = getattr(self, name)
            if not (name == "seed" and value is None) and validate.whole(name, value) < least:
                raise OptionError(f"{name} is {value}; it must be at least {least}")
        if not 0 < validate.number("alpha", self.alpha) < 0.5:
            raise OptionError(f"alpha is {self.alpha}; it must be above 0 and below 0.5")
        if not 0 <= validate.number("near_tie", self.near_tie) < float("inf"):
            raise OptionError(f"near_tie is {self.near_tie}; it must be 0 or more, and finite")
        own: GenerateOptions = {"n_draft": self.n_draft, "tree": self.tree, "verify": self.verify}
        CheckedOptions.of({**self.options, **own})

    @property
    def drafter(self) -> str:
        return "auto" if self.n_draft == "auto" else "model"

    @property
    def n_together(self) -> int:
        n_draft = self.n_draft
        return 1 + (n_draft if isinstance(n_draft, int) else defaults.N_DRAFT_FIXED)

    @property
    def is_greedy(self) -> bool:
        return CheckedOptions.of(self.options).sampling.effective_temperature == 0


@dataclass(frozen=True)
class Distances:
    """Total variation distances of next-token distributions from the target's, token by token.

    They are the target's own in batches, or those of the rule's next token.
    """

    n_positions: int
    median: float
    largest: float
    # Due to numerical error: median distance in batches of a prompt (0 where these change no bit),
    # or largest of the integral.
    resolution: float
    found: bool  # whether the difference is more than numerical error

    @staticmethod
    def of_batches(distances: Sequence[float], roundings: Sequence[float] | None) -> Distances:
        """`roundings`: None if batches must not change a bit."""
        median, rounding = float(np.median(distances)), 0.0
        found = max(distances) > 0
        if roundings is not None:
            rounding = float(np.median(roundings))
            found = median > max(BATCH_TOLERANCE, ROUNDING_FACTOR * rounding)
        return Distances(len(distances), median, max(distances), rounding, found)

    @staticmethod
    def of_rule(n_positions: int, errors: Sequence[float], resolution: float) -> Distances:
        found = max(errors) > 3 * resolution + RULE_TOLERANCE
        return Distances(n_positions, float(np.median(errors)), max(errors), resolution, found)


@dataclass(frozen=True)
class Sequences:
    """Sampled texts of plain and of speculative decoding, compared by two-sample tests.

    `n_impossible`: number of tokens (plain, speculative) whose probability is 0 in batched
    evaluation; rounding at the cut-off of top-k or top-p causes a few.
    """

    n_texts: int
    n_tokens_plain: int
    n_tokens_speculative: int
    n_drafted: int
    n_accepted: int
    n_impossible: tuple[int, int]
    alpha: float  # probability of a false alarm of all tests
    smallest_shift: float  # the mean shift that the tests find with 90 % probability
    tests: tuple[Test, ...]

    @property
    def found(self) -> tuple[Test, ...]:
        return tuple(test for test in self.tests if test.p_holm <= self.alpha)


@dataclass(frozen=True)
class AuditedDivergence:
    prompt: int
    position: int
    tokens: tuple[int, int]
    gap: float  # by how many logits the less likely of the two is below the likeliest token


@dataclass(frozen=True)
class Greedy:
    """Texts at temperature 0, plain and speculative, one for each prompt."""

    n_texts: int
    # The option, or the measured change of a gap by rounding if that is larger; None: batches
    # change no bit, so every divergence counts.
    near_tie: float | None
    divergences: tuple[AuditedDivergence, ...]

    @property
    def found(self) -> tuple[AuditedDivergence, ...]:
        """The divergences that rounding does not explain."""
        tie = self.near_tie
        return tuple(each for each in self.divergences if tie is None or each.gap > tie)


@dataclass(frozen=True)
class AuditReport:
    """The findings of an audit; some are None at temperature 0."""

    settings: AuditOptions
    n_prompts: int
    batch: Distances | None
    rule: Distances | None
    sequences: Sequences | None
    greedy: Greedy

    @property
    def differences(self) -> tuple[str, ...]:
        """A phrase for each difference that was found."""
        found = []
        if self.rule is not None and self.rule.found:
            found.append(
                f"the next-token distribution of rule {self.settings.verify} is off by "
                f"{self.rule.largest:.2g} (resolution {self.rule.resolution:.1g})"
            )
        if self.batch is not None and self.batch.found:
            found.append(
                f"batches change the target's distribution by {self.batch.median:.2g} or more at "
                f"half of all positions, rounding alone by {self.batch.resolution:.2g}"
            )
        if self.sequences is not None and (tests := self.sequences.found):
            names = ", ".join(f"{test.name} (p = {test.p_holm:.1g})" for test in tests)
            found.append(f"the sampled texts differ: {names}")
        if self.greedy.found:
            found.append(
                f"{len(self.greedy.found)} of {self.greedy.n_texts} greedy texts diverge without a "
                "near-tie"
            )
        return tuple(found)

    @property
    def verdict(self) -> str:
        """The differences found, or the smallest difference that would be found; what to do."""
        if self.differences:
            return (
                f"A difference was found: {'; '.join(self.differences)}. Repeat the audit with "
                "another seed; if it finds the difference again, use another rule (verify, "
                "--verify) or no draft."
            )
        if self.sequences is None:
            n_ties = len(self.greedy.divergences)
            return (
                f"No difference was found: {self.greedy.n_texts - n_ties} of "
                f"{self.greedy.n_texts} greedy texts are identical, {n_ties} diverge at near-ties."
            )
        if not self.sequences.n_drafted:
            return (
                "Nothing was tested: every text ended at its first token, so nothing was drafted. "
                "Use other prompts."
            )
        if self.sequences.smallest_shift > LARGEST_SHIFT:
            return (
                "No difference was found, but there are too few texts to find one; generate more "
                "(n_runs, --runs)."
            )
        return (
            f"No difference was found; a mean shift of {self.sequences.smallest_shift:.3f} or more "
            "would have been found with 90 % probability. Four times as many texts "
            "(n_runs, --runs) find half of that."
        )
