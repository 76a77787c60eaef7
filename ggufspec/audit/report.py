"""What an audit found, and the sentence that it comes to.

Pure: facts and their limits, no printing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ggufspec.audit.statistics import Test
from ggufspec.common import defaults, validate
from ggufspec.decoding import verify as rules
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import OptionError

# A batch that moves the law of an ordinary position by more than this is no rounding.
LAW_TOLERANCE = 0.01
# Places are uniform in [0, 1): their means cannot be further apart.
LARGEST_SHIFT = 0.5
# A rule's law may be this far off besides 3 times the resolution of its integral.
RULE_TOLERANCE = 0.002


@dataclass(frozen=True)
class AuditOptions:
    """What is audited, and how closely. Raises OptionError for values that cannot be used."""

    n_runs: int = defaults.AUDIT_RUNS  # texts of each kind; the prompts take turns
    n_tokens: int = defaults.AUDIT_TOKENS  # the most that a text has
    alpha: float = defaults.AUDIT_ALPHA  # chance of a false alarm, of all tests together
    near_tie: float = defaults.AUDIT_NEAR_TIE  # logits this close may change places
    seed: int | None = None  # None: a fresh one
    n_draft: int | str = defaults.N_DRAFT_FIXED  # "auto", as run does: fewer are drafted
    verify: str = defaults.VERIFY
    # What else `generate` is asked: the sampling, a grammar, the draft's temperature.
    options: GenerateOptions = field(default_factory=GenerateOptions)

    def __post_init__(self) -> None:
        for name in ("n_runs", "n_tokens"):
            validate.whole(name, getattr(self, name))
        for name in ("alpha", "near_tie"):
            validate.number(name, getattr(self, name))
        if self.seed is not None:
            validate.whole("seed", self.seed)
        if self.n_runs < 1:
            raise OptionError(
                f"n_runs is {self.n_runs}; an audit needs at least 1 text of each kind, "
                f"and finds little with fewer than {defaults.AUDIT_RUNS}"
            )
        if self.n_tokens < 2:
            raise OptionError(
                f"n_tokens is {self.n_tokens}; it must be at least 2, or nothing would be drafted"
            )
        if not 0 < self.alpha < 0.5:
            raise OptionError(f"alpha is {self.alpha}; it must be above 0 and below 0.5")
        if not 0 <= self.near_tie < float("inf"):
            raise OptionError(f"near_tie is {self.near_tie}; it must be 0 or more, and finite")
        if self.seed is not None and self.seed < 0:
            raise OptionError(f"seed is {self.seed}; it must be 0 or more")
        CheckedOptions.of({**self.options, "n_draft": self.n_draft})
        rules.rule(self.verify)

    @property
    def drafter(self) -> str:
        """Who drafts the texts on trial."""
        return "auto" if self.n_draft == "auto" else "model"

    @property
    def n_together(self) -> int:
        """Tokens of a batch that is compared with single tokens."""
        n_draft = self.n_draft
        return 1 + (n_draft if isinstance(n_draft, int) else defaults.N_DRAFT_FIXED)

    @property
    def is_greedy(self) -> bool:
        """Whether the texts are written at temperature 0."""
        return self.options.get("temperature", defaults.TEMPERATURE) == 0


@dataclass(frozen=True)
class BatchLaws:
    """Total variation distances of the target's laws: from verification batches, token by token."""

    n_positions: int
    median: float
    largest: float

    @property
    def found(self) -> bool:
        """Whether batches do more than round differently."""
        return self.median > LAW_TOLERANCE


@dataclass(frozen=True)
class RuleLaws:
    """Total variation distances of the rule's law of the next token from the target's law.

    `resolution` is that of the numerical integrals, at the position where it is coarsest.
    """

    n_positions: int
    median: float
    largest: float
    resolution: float

    @property
    def found(self) -> bool:
        """Whether the rule is further off than its integral can be."""
        return self.largest > 3 * self.resolution + RULE_TOLERANCE


@dataclass(frozen=True)
class Sequences:
    """Texts by plain and by speculative decoding, compared by two-sample tests.

    `smallest_shift` is the shift that would have been found with 90 % power. `n_impossible` counts
    tokens, plain and speculative, that have no chance by the target's law: rounding at the edge of
    a truncation makes a few. `alpha` is that of the family of tests.
    """

    n_texts: int
    n_tokens_plain: int
    n_tokens_speculative: int
    n_drafted: int
    n_accepted: int
    n_impossible: tuple[int, int]
    alpha: float
    smallest_shift: float
    tests: tuple[Test, ...]

    @property
    def found(self) -> tuple[Test, ...]:
        """The tests that found a difference."""
        return tuple(test for test in self.tests if test.p_holm <= self.alpha)


@dataclass(frozen=True)
class Parting:
    """Where two greedy texts part: tokens (plain, speculative) at a position of the text.

    `gap` (in logits) is how far the lesser of the two is below the largest logit there.
    """

    prompt: int
    position: int
    tokens: tuple[int, int]
    gap: float


@dataclass(frozen=True)
class Greedy:
    """Texts at temperature 0, plain and speculative, one for each prompt."""

    n_texts: int
    near_tie: float
    partings: tuple[Parting, ...]

    @property
    def found(self) -> tuple[Parting, ...]:
        """Where texts part although no two logits are close."""
        return tuple(parting for parting in self.partings if parting.gap > self.near_tie)


@dataclass(frozen=True)
class AuditReport:
    """An audit's findings. `batch`, `rule` and `sequences` are None at temperature 0."""

    settings: AuditOptions
    n_prompts: int
    batch: BatchLaws | None
    rule: RuleLaws | None
    sequences: Sequences | None
    greedy: Greedy

    @property
    def differences(self) -> tuple[str, ...]:
        """What was found, a phrase for each; empty: no difference."""
        found = []
        if self.rule is not None and self.rule.found:
            found.append(
                f"the rule's law of the next token is off by {self.rule.largest:.2g} "
                f"(resolution {self.rule.resolution:.1g})"
            )
        if self.batch is not None and self.batch.found:
            found.append(
                f"batches change the target's law by {self.batch.median:.2g} at half of all tokens"
            )
        if self.sequences is not None and self.sequences.found:
            names = ", ".join(
                f"{test.name} (p = {test.p_holm:.1g})" for test in self.sequences.found
            )
            found.append(f"the sampled texts differ by {names}")
        if self.greedy.found:
            found.append(
                f"{len(self.greedy.found)} of {self.greedy.n_texts} greedy texts part "
                "where there is no near-tie"
            )
        return tuple(found)

    @property
    def verdict(self) -> str:
        """One sentence: what was found, or what would have been."""
        if self.differences:
            return f"A difference was found: {'; '.join(self.differences)}."
        if self.sequences is None:
            n_tied = len(self.greedy.partings)
            return (
                f"No difference was found: {self.greedy.n_texts - n_tied} of "
                f"{self.greedy.n_texts} greedy texts are the same, {n_tied} part at near-ties."
            )
        if not self.sequences.n_drafted:
            return (
                "Nothing was drafted, so nothing was tested: every text ended at its first token."
            )
        if self.sequences.smallest_shift > LARGEST_SHIFT:
            return (
                "No difference was found, but these are too few texts to find one; write more "
                "(n_runs, --runs)."
            )
        return (
            "No difference was found; a mean shift of "
            f"{self.sequences.smallest_shift:.3f} would have been, with 90 % power."
        )
