"""Forced text costs no draft step, is learned about, and says nothing of the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes import FakeSession, drafter_of, known_costs, speculated

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Draft, Round, Verdict
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.forced_text import ForcedText
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable

PIECES = (b"a", b"b", b"ab", b"c", b"d", b"<end>")
A, B, AB, C, D, END = range(6)
PROMPT = (C, D)


def constraint_of(regex: str) -> GrammarConstraint:
    def tokenize(before: bytes, text: bytes) -> list[int]:
        tokens = []
        while piece := next((p for p in (b"ab", *PIECES[:5]) if text.startswith(p)), b""):
            tokens.append(PIECES.index(piece))
            text = text[len(piece) :]
        return tokens

    table = TokenTable(PIECES, special=[END], stop_tokens=[END], tokenize=tokenize)
    return GrammarConstraint(table, grammar.of_regex(regex), len(PROMPT))


def preferring(*tokens: int) -> FakeSession:
    """A model that likes some tokens best, in this order."""

    def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(len(PIECES))
        row[list(tokens)] = [20.0 - 5 * i for i in range(len(tokens))]
        return row

    return FakeSession(logits_after)


def rounds_of(
    regex: str,
    drafter: str,
    target: FakeSession,
    *,
    draft: FakeSession | None = None,
    policy: LengthPolicy | None = None,
    n_draft: int = 8,
    n_tokens: int = 60,
) -> tuple[list[int], list[Round], dict[str, float]]:
    """The text, its rounds, and the drafter's notes."""
    constraint, policy = constraint_of(regex), policy or LengthPolicy()
    sampling = Sampling(temperature=0.0, constraint=constraint)
    how: dict[str, Any] = {"sampling": sampling, "n_draft": n_draft, "stop_tokens": (END,)}
    made = drafter_of(drafter, draft, policy=policy, forced=ForcedText(constraint), **how)
    tokens, rounds = list(PROMPT), []
    for round_ in speculated(tokens, target=target, drafter=made, n_tokens=n_tokens, **how):
        policy.observe_round(round_)
        rounds.append(round_)
    return tokens[len(PROMPT) :], rounds, made.notes()


def costing(seconds: Sequence[float]) -> LengthPolicy:
    return LengthPolicy(known_costs(seconds, 0.05), (0.4, 2.0))


@pytest.mark.parametrize("drafter", ["forced", "ngram", "model", "auto"])
def test_forced_text_is_drafted_in_one_pass_without_the_draft_model(drafter: str) -> None:
    target, draft = preferring(AB, A, B), preferring(AB, A, B)
    text, rounds, notes = rounds_of("(ab){6}", drafter, target, draft=draft)
    assert text == [AB] * 6
    assert [(round_.n_drafted, round_.n_accepted) for round_ in rounds] == [(6, 6)]
    assert draft.n_scores == 0
    assert target.n_scores == 1
    assert (notes["n_forced"], notes["forced_acceptance"]) == (6, 1)


def test_the_draft_model_is_evaluated_where_there_is_a_choice_alone() -> None:
    target, draft = preferring(AB, C, A, B), preferring(AB, C, A, B)
    text, rounds, notes = rounds_of("ab(c|d)abab(c|d)ab", "model", target, draft=draft)
    assert text == [AB, C, AB, AB, C, AB]
    assert [round_.n_accepted for round_ in rounds] == [6]
    assert draft.n_scores == 2
    assert notes["n_forced"] == 4


@pytest.mark.parametrize("right", [True, False])
def test_the_policy_learns_of_drawn_tokens_alone(right: bool) -> None:
    """Not of the four forced ones; up to the first drawn token that is rejected."""
    verdicts: list[tuple[int, list[float]]] = []

    class Recording(LengthPolicy):
        def observe_verdict(self, n_accepted: int, acceptances: Sequence[float]) -> None:
            verdicts.append((n_accepted, list(acceptances)))

    draft = preferring(AB, C, A, B) if right else preferring(AB, D, A, B)
    target = preferring(AB, C, A, B)
    policy = Recording(prior=(0.0, 0.0))
    rounds_of("ab(c|d)abab(c|d)ab", "model", target, draft=draft, policy=policy)
    assert verdicts[0] == ((2, [1.0, 1.0]) if right else (0, [0.0]))


@pytest.mark.parametrize("n_draft", [1, 4])
def test_no_more_is_drafted_than_a_round_may(n_draft: int) -> None:
    target, draft = preferring(AB, C, A, B), preferring(AB, C, A, B)
    for drafter in ("forced", "ngram", "model", "auto"):
        _, rounds, _ = rounds_of(
            "(ab){5}(c|d)(ab){5}", drafter, target, draft=draft, n_draft=n_draft
        )
        assert max(round_.n_drafted for round_ in rounds) == n_draft
        short, rounds, _ = rounds_of(
            "(ab){5}(c|d)", drafter, target, draft=draft, n_draft=n_draft, n_tokens=3
        )
        assert len(short) == 3
        assert all(round_.n_drafted < 3 for round_ in rounds)


@pytest.mark.parametrize("drafter", ["forced", "model"])
def test_forced_tokens_that_are_always_rejected_are_soon_no_longer_drafted(drafter: str) -> None:
    """The target writes "a" and "b" for each "ab", then no longer."""
    curve = [1.0 + 0.6 * n for n in range(9)]

    def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(len(PIECES))
        row[[A, B] if len(prefix) < 62 else [AB, AB]] = 20.0
        return row

    text, rounds, notes = rounds_of(
        "(ab){60}",
        drafter,
        FakeSession(logits_after),
        draft=preferring(A, B),
        policy=costing(curve),
        n_tokens=90,
    )
    assert text == [A, B] * 30 + [AB] * 30
    starts = np.cumsum([0, *(len(round_.tokens) for round_ in rounds)])
    lengths = {start: round_.n_drafted for start, round_ in zip(starts, rounds, strict=False)}
    assert max(lengths[start] for start in lengths if start < 4) > 2
    assert max(lengths[start] for start in lengths if 30 <= start < 60) <= 1
    assert max(lengths[start] for start in lengths if 75 <= start < 85) > 0
    seconds = sum(curve[round_.n_drafted] for round_ in rounds[: len(lengths)])
    assert seconds < 90
    assert notes["forced_acceptance"] < 1


def test_where_rejections_are_rare_one_changes_little() -> None:
    """One word that the target writes in other tokens, in much forced text."""
    policy = costing([1.0 + 0.1 * n for n in range(9)])

    def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
        row = np.zeros(len(PIECES))
        row[[A, B] if len(prefix) == 20 else [AB, AB]] = 20.0
        return row

    text, rounds, _ = rounds_of("(ab){60}", "forced", FakeSession(logits_after), policy=policy)
    assert {A, B} < set(text)
    assert sum(round_.n_drafted > 5 for round_ in rounds) > len(rounds) - 4


class Forcing:
    """Forces two tokens wherever it is asked."""

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        return [A, B]

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return 1

    def n_free(self, tokens: Sequence[int]) -> int:
        return 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        return False


def observed(forced: ForcedText, n_accepted: int, acceptances: Sequence[float]) -> None:
    """A round with drafted forced tokens that the target accepts with these probabilities."""
    forced.start_round()
    forced.drafted(0, len(acceptances))
    rows = np.zeros((len(acceptances) + 1, 6), np.float32)
    rows[:, C] = [*(1 - acceptance for acceptance in acceptances), 1]
    rows[:-1, A] = acceptances
    draft = Draft([A] * len(acceptances))
    for _ in range(2):  # of two drafters that share it
        forced.observe(draft, rows, Verdict(n_accepted, C))


def test_acceptance_is_learned_up_to_the_first_rejected_token() -> None:
    forced = ForcedText(Forcing())  # type: ignore[arg-type]
    before = forced.probabilities([A, B])
    observed(forced, 1, [1.0, 0.0, 0.0, 0.0])
    assert forced.notes() == {"n_forced": 2, "forced_acceptance": 0.5}
    first, second = forced.probabilities([A, B])
    assert first < before[0]  # a token was rejected
    assert second < before[1]
    observed(forced, 2, [1.0, 1.0])
    again = forced.probabilities([A, B])
    assert again[0] == again[1] > second
    for _ in range(40):
        observed(forced, 0, [0.0])
    assert forced.probabilities([A])[0] < 0.1
    for _ in range(200):
        observed(forced, 1, [1.0])
    assert forced.probabilities([A])[0] > 0.8


def test_without_a_constraint_nothing_is_forced() -> None:
    forced = ForcedText()
    assert not forced.after([A, B])
    assert not forced.is_over([A, B])
    assert forced.n_allowed([A], [B, C]) == 2
    assert forced.probabilities([]) == []
    assert forced.notes() == {}
