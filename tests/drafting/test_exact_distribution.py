"""Under a grammar or a reasoning budget, every text has the target's probability: by enumeration.

The loop, the drafters and the constraints are the real ones. Each time that they use a uniform, all
tokens that it could draw are tried, and each time that a draft is judged, all verdicts.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from enumerated import Choices, Distribution, distance, judged
from fakes import FakeSession, known_costs, speculated

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Constraint, Draft, Probs, Uniforms, Verdict, Verify
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.forced_text import ForcedText
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable
from ggufspec.structured.reasoning_budget import ReasoningBudget, TokenMarks

Logits = Callable[[tuple[int, ...]], np.ndarray]

PIECES = (b"a", b"b", b"ab", b"c", b"<end>")
END = 4
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """A regular expression, the most tokens of a text, and what comes before it."""

    regex: str
    n_tokens: int
    prompt: tuple[int, ...] = (3, 0)
    usual: tuple[bytes, ...] = (b"ab", b"a", b"b", b"c")  # of forced text: the first that fits

    def tokenize(self, before: bytes, text: bytes) -> list[int]:
        tokens = []
        while text:
            piece = next((piece for piece in self.usual if text.startswith(piece)), b"")
            if not piece:
                break
            tokens.append(PIECES.index(piece))
            text = text[len(piece) :]
        return tokens

    def constraint(self) -> Constraint:
        table = TokenTable(PIECES, special=[END], stop_tokens=[END], tokenize=self.tokenize)
        return GrammarConstraint(table, grammar.of_regex(self.regex), len(self.prompt))

    @cache  # noqa: B019
    def allowed(self, text: tuple[int, ...]) -> list[int]:
        """By trying all that could follow."""
        data = b"".join(PIECES[token] for token in text).decode()
        letters = (itertools.product("abc", repeat=n) for n in range(8))
        texts = map("".join, itertools.chain.from_iterable(letters))
        matches = [text for text in texts if re.fullmatch(self.regex, text)]
        following = [
            token
            for token, piece in enumerate(PIECES[:END])
            if any(match.startswith(data + piece.decode()) for match in matches)
        ]
        return [*following, END] if data in matches else following


# Forced text in front of a choice, in four tokenizations; between drawn tokens; and a text that may
# end after each repetition.
CASES = {
    "in front": Case("abab(a|c)", 5),
    "in front, letters": Case("abab(a|c)", 5, usual=(b"a", b"b", b"c")),
    "between": Case("(a|c)ab(b|c)ab", 5),
    "between, repeated": Case("(a|c)ab(b|c)ab", 5, prompt=(0, 2, 1, 2, 0, 2, 1, 2)),
    "open": Case("c(ab|bc)*", 4),
    "open, repeated": Case("c(ab|bc)*", 4, prompt=(3, 2, 1, 3, 2, 1)),
}


@dataclass(frozen=True)
class Reasoning(Case):
    """Reasoning of at most `n_most` tokens, between "c" and "ab", whose end mark is two tokens."""

    n_most: int = 0
    is_open: bool = False  # by the prompt

    def constraint(self) -> Constraint:
        marks = TokenMarks(b"c", b"ab", (0, 1), PIECES.__getitem__)
        return ReasoningBudget(
            marks, self.n_most, len(self.prompt), len(PIECES), is_open=self.is_open
        )

    @cache  # noqa: B019
    def allowed(self, text: tuple[int, ...]) -> list[int]:
        n, is_open, may_open, thought = 0, self.is_open, not self.is_open, b""
        for token in text:
            if is_open:
                n, thought = n + 1, thought + PIECES[token]
                is_open, may_open = b"ab" not in thought, b"ab" in thought
            else:
                is_open, may_open, thought = may_open and token == 3, False, b""
        if not is_open or n < self.n_most:
            return [0, 1, 2, 3, END]
        return [1] if thought and text[-1] == 0 else [0]


# The end is reached by the budget or before; by one token or by two; twice, or in a begun mark.
BUDGETS = {
    f"{n_most}, {'opened' if is_open else 'by the model'}": Reasoning(
        "", 4, prompt, n_most=n_most, is_open=is_open
    )
    for n_most, is_open, prompt in (
        (0, True, (3, 0)),
        (1, True, (0, 3, 0)),
        (2, True, (3, 2, 1, 3, 2, 1)),
        (0, False, (3, 0, 0, 1)),
        (1, False, (3, 0, 3, 2, 1)),
    )
}


def logits_of(seed: int, spread: float = 1.2) -> Logits:
    """A fixed random function of the last two tokens and of the length."""

    @cache
    def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix[-2:]])
        return rng.normal(0, spread, len(PIECES)).astype(np.float32)

    return logits_after


# They are far from each other, so all verdicts happen.
TARGET, DRAFT = map(logits_of, (1, 2))


@cache
def sampled(case: Case, logits: Logits, text: tuple[int, ...], top_k: int = 0) -> np.ndarray:
    """The distribution of the next token: masked, truncated, renormalised."""
    row = np.full(len(PIECES), -np.inf)
    allowed = case.allowed(text)
    row[allowed] = logits((*case.prompt, *text))[allowed]
    if top_k:
        row[np.argsort(-row)[top_k:]] = -np.inf
    weights = np.exp((row - row.max()) / TEMPERATURE)
    return weights / weights.sum()


def target_distribution(case: Case, top_k: int = 0) -> Distribution:
    """The probability of every text of the target alone; it ends where only the end can follow."""
    ended: Distribution = {}
    going: Distribution = {(): 1.0}
    while going:
        longer: Distribution = {}
        for text, p in going.items():
            is_over = bool(text) and (text[-1] == END or case.allowed(text) == [END])
            if is_over or len(text) == case.n_tokens:
                ended[text] = p
                continue
            for token, q in enumerate(sampled(case, TARGET, text, top_k)):
                if q > 0:
                    longer[(*text, token)] = p * float(q)
        going = longer
    return ended


# All that can happen


@dataclass
class DraftUniforms:
    """A uniform is looked up when its token is drawn: then it is known what it can draw."""

    choices: Choices
    case: Case
    session: FakeSession
    temperature: float
    top_k: int
    scored: list[tuple[int, ...]]
    drawn: list[int] = field(default_factory=list)

    def __call__(self, n: int) -> Uniforms:
        return self  # type: ignore[return-value]

    def __getitem__(self, i: int) -> float:
        text = self.scored[-1][len(self.case.prompt) :]
        probs = tempered(sampled(self.case, DRAFT, text, self.top_k), self.temperature)
        token = self.choices.choose(probs.tolist())
        self.drawn.append(token)
        return float(probs[:token].sum() + probs[token] / 2)


def tempered(probs: np.ndarray, temperature: float) -> np.ndarray:
    weights = probs ** (TEMPERATURE / temperature)
    return weights / weights.sum()


def speculative_distribution(
    case: Case,
    drafter: str,
    rule: str,
    policy: Callable[[], LengthPolicy] = LengthPolicy,
    *,
    top_k: int = 0,
) -> tuple[Distribution, Counter[str]]:
    """The probability of every text, and in how many rounds of all runs something happened."""
    constraint = case.constraint()
    sampling = Sampling(
        temperature=TEMPERATURE, top_k=top_k, top_p=1, min_p=0, constraint=constraint
    )
    choices, distribution = Choices(), Distribution()
    seen: Counter[str] = Counter()
    for _ in choices.runs():
        scored: list[tuple[int, ...]] = []

        def draft_logits(prefix: tuple[int, ...], scored: list[tuple[int, ...]] = scored) -> object:
            scored.append(prefix)
            return DRAFT(prefix)

        session = FakeSession(draft_logits)  # type: ignore[arg-type]
        uniforms = DraftUniforms(choices, case, session, 0.6, top_k, scored)
        forced = ForcedText(constraint)
        materials = drafters.Materials(
            sampling,
            uniforms,
            (END,),
            session,
            draft_temperature=0.6,
            n_draft_max=3,
            policy=policy(),
            forced=forced,
        )
        if drafter == "staged":
            stage = stage_of(materials, judged(rule, choices))
            materials = replace(materials, stage=stage)
        tokens = array("i", case.prompt)
        judge = judged(rule, choices)

        def watched(
            draft: Draft,
            target_probs: Probs,
            given: Uniforms,
            judge: Verify = judge,
            forced: ForcedText = forced,
            uniforms: DraftUniforms = uniforms,
        ) -> Verdict:
            verdict = judge(draft, target_probs, given)
            others = [i for i in range(len(draft.tokens)) if i not in forced.positions]
            if draft.probs is not None and uniforms.drawn:  # not of bursts
                assert [draft.tokens[i] for i in others] == uniforms.drawn[: len(others)]
            uniforms.drawn.clear()
            seen["forced first"] += 0 in forced.positions
            seen["forced behind others"] += any(
                i < max(forced.positions, default=0) for i in others
            )
            seen["others"] += bool(others)
            seen["partly accepted"] += 0 < verdict.n_accepted < len(draft.tokens)
            return verdict

        for _ in speculated(
            tokens,
            target=FakeSession(TARGET),
            drafter=drafters.make(drafter, materials),
            verify=watched,
            sampling=sampling,
            uniforms=lambda n: [0.5] * n,
            n_draft=3,
            n_end=len(case.prompt) + case.n_tokens,
            stop_tokens=(END,),
        ):
            pass
        text = tuple(tokens[len(case.prompt) :])
        if case.allowed(text[:-1]) == [END]:
            text = text[:-1]  # a round may add the end that a complete text does not need
        distribution[text] = distribution.get(text, 0.0) + choices.probability
    return distribution, seen


def stage_of(materials: drafters.Materials, rule: Verify) -> drafters.Stage:
    """N-grams for the draft model; every verdict of the draft model is tried."""
    forced = ForcedText(materials.sampling.constraint)
    own = replace(materials, policy=LengthPolicy(), forced=forced)
    return drafters.Stage(own, rule, lambda n: [0.5] * n)


def by_gaps() -> LengthPolicy:
    """Goes on only where the draft model is sure enough, and has been so far."""
    return LengthPolicy(known_costs([1.0, 1.2, 1.5, 1.9], 0.01), (0.8, 1.0))


def by_costs() -> LengthPolicy:
    """Learns from verdicts, at known costs."""
    return LengthPolicy(known_costs([1.0, 1.1, 1.3, 1.5], 0.02), (0.4, 1.0), block_bonus=0.05)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [*((name, "traversal") for name in drafters.names()), ("auto", "match"), ("auto", "rejection")],
)
def test_every_text_has_the_targets_probability(drafter: str, rule: str) -> None:
    seen: Counter[str] = Counter()
    for case in CASES.values():
        found, happened = speculative_distribution(case, drafter, rule)
        assert distance(found, target_distribution(case)) < 1e-6
        seen += happened
    if drafter != "none":
        assert seen["forced first"] > 50
        assert seen["partly accepted"] > 5
    if drafter in ("ngram", "model", "auto"):
        assert seen["others"] > 30
    if drafter in ("model", "auto"):
        assert seen["forced behind others"] > 30


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("drafter", drafters.names())
def test_so_it_does_where_the_end_of_reasoning_is_forced(drafter: str, name: str) -> None:
    case = BUDGETS[name]
    top_k = 2 + case.is_open  # else there are too many ways
    found, seen = speculative_distribution(case, drafter, "traversal", top_k=top_k)
    expected = target_distribution(case, top_k)
    assert distance(found, expected) < 1e-6
    assert any(text[0] == 3 for text in expected) or case.is_open
    if drafter != "none":
        assert seen["forced first"] + seen["forced behind others"] > 0, seen


def test_so_it_does_if_a_policy_ends_staged_drafts() -> None:
    found, _ = speculative_distribution(CASES["between"], "staged", "traversal", by_gaps)
    assert distance(found, target_distribution(CASES["between"])) < 1e-6


@pytest.mark.parametrize("policy", [by_gaps, by_costs])
def test_so_it_does_if_a_policy_ends_drafts(policy: Callable[[], LengthPolicy]) -> None:
    """By what was drawn, and what was learned from the rounds before."""
    for case in CASES.values():
        found, _ = speculative_distribution(case, "auto", "traversal", policy)
        assert distance(found, target_distribution(case)) < 1e-6


def test_so_it_does_where_the_samplers_cut_what_the_grammar_allows() -> None:
    """What is allowed is kept, however unlikely it is among all."""
    for top_k in (1, 2):
        for case in CASES.values():
            expected = target_distribution(case, top_k)
            assert (len(expected) == 1) == (top_k == 1)
            for drafter in ("forced", "auto"):
                found, _ = speculative_distribution(case, drafter, "traversal", top_k=top_k)
                assert distance(found, expected) < 1e-6
