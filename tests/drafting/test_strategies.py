"""The drafting strategy changes the speed, never the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from fakes import (
    GREEDY,
    FakeSession,
    drafter_of,
    hashed_logits,
    scripted_logits,
    speculated,
)

from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Logits, Round
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.draft_length import Action, LengthPolicy
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import DecodeError

N_VOCAB = 30
LOOP = [3, 4, 5, 6, 7, 8, 9, 10]


def run(
    target: FakeSession,
    name: str,
    *,
    draft: FakeSession | None = None,
    policy: LengthPolicy | None = None,
    stop_tokens: tuple[int, ...] = (),
    n_tokens: int = 60,
    prompt: tuple[int, ...] = (1, 2),
    sampling: Sampling = GREEDY,
) -> tuple[list[int], list[Round]]:
    own = drafters.Materials(sampling, uniform_streams(3)[1], stop_tokens, draft)
    stage = drafters.Stage(own, verify.rule("block"), uniform_streams(3, 3)[2])
    how: dict[str, Any] = {"sampling": sampling, "stop_tokens": stop_tokens}
    more = {"stage": stage} if name == "staged" else {}
    drafter = drafter_of(name, draft, policy=policy or LengthPolicy(), **how, **more)
    tokens = list(prompt)
    rounds = [*speculated(tokens, target=target, drafter=drafter, n_tokens=n_tokens, **how)]
    return tokens[len(prompt) :], rounds


@pytest.mark.parametrize("name", drafters.names())
@pytest.mark.parametrize("seed", [1, 2])
def test_the_text_is_the_targets(name: str, seed: int) -> None:
    logits = hashed_logits(N_VOCAB, 1)
    plain, _ = run(FakeSession(logits), "none")
    draft = FakeSession(hashed_logits(N_VOCAB, seed))
    assert run(FakeSession(logits), name, draft=draft)[0] == plain


def test_a_staged_draft_model_needs_fewer_passes() -> None:
    logits = scripted_logits(LOOP, N_VOCAB)
    alone, staged = FakeSession(logits), FakeSession(logits)
    _, rounds = run(FakeSession(logits), "model", draft=alone)
    _, rounds_staged = run(FakeSession(logits), "staged", draft=staged)
    assert [each.n_drafted for each in rounds_staged] == [each.n_drafted for each in rounds]
    assert staged.n_scores < 0.5 * alone.n_scores


@pytest.mark.parametrize("name", ["ngram", "auto"])
def test_what_repeats_is_drafted_without_a_model(name: str) -> None:
    target = FakeSession(scripted_logits(LOOP, N_VOCAB))
    text, rounds = run(target, name)
    assert sum(round_.n_accepted for round_ in rounds) > 0.6 * len(text)
    assert len(rounds) < 22


def test_where_nothing_repeats_nothing_is_drafted() -> None:
    script = list(range(3, 28))
    _, rounds = run(FakeSession(scripted_logits(script, N_VOCAB)), "ngram", n_tokens=20)
    assert all(round_.n_drafted == 0 for round_ in rounds)
    assert rounds[0].why == "no n-gram match is likely enough"


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    script = [*LOOP, *LOOP, *LOOP[:4], 2]
    target = FakeSession(scripted_logits(script, N_VOCAB))
    text, rounds = run(target, "ngram", stop_tokens=(6,), prompt=(*LOOP, *LOOP), n_tokens=20)
    assert text[-1] == 6
    assert all(6 not in round_.tokens[:-1] for round_ in rounds)
    assert sum(round_.n_drafted for round_ in rounds) <= len(text)


def test_the_model_drafts_where_the_text_does_not_repeat() -> None:
    """A loop, then text that only the draft model predicts: each strategy has its rounds."""
    script = [*LOOP * 6, *list(range(3, 28))]
    logits = scripted_logits(script, N_VOCAB)
    _, rounds = run(FakeSession(logits), "auto", draft=FakeSession(logits), n_tokens=70)
    authors = [round_.why.startswith("n-gram") for round_ in rounds if round_.n_drafted]
    assert any(authors)
    assert not all(authors)
    assert len(rounds) < 16


class FailingSession(FakeSession):
    """Fails from the fourth pass on: with an error, or with logits that are no numbers."""

    raises: bool

    def score(self, *arguments: Any) -> Logits:
        logits = super().score(*arguments)
        if self.n_scores > 3:
            if self.raises:
                raise DecodeError("llama.cpp could not decode 1 tokens")
            logits[:] = np.nan
        return logits


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("logit_bias", [{}, {3: -5.0}])
@pytest.mark.parametrize("name", ["auto", "model", "staged"])
def test_a_draft_model_that_fails_is_left_out_from_then_on(
    name: str, logit_bias: dict[int, float], raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logits = hashed_logits(N_VOCAB, 1)
    sampling = Sampling(temperature=0, logit_bias=logit_bias)
    plain, _ = run(FakeSession(logits), "none", sampling=sampling)
    draft, policy = FailingSession(logits), LengthPolicy()
    draft.raises = raises
    tokens, rounds = run(FakeSession(logits), name, draft=draft, policy=policy, sampling=sampling)
    assert tokens == plain
    assert rounds[0].n_accepted > 0
    assert rounds[-1].why == "the draft model has failed"
    assert draft.n_scores == 4
    assert len(caplog.messages) == 1
    assert "the draft model has failed" in str(policy.advice())


class ReadingSession(FakeSession):
    """Notes how many tokens each score had to read, as a session with a KV cache does."""

    def __init__(self, logits_after: Callable[[tuple[int, ...]], np.ndarray], held: list[int]):
        super().__init__(logits_after)
        self.n_read: list[int] = []
        self._held = held

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._held, tokens, strict=False))
        self.n_read.append(len(tokens) - sum(1 for _ in same))
        self._held = list(tokens)
        return super().score(tokens, draft)


class SometimesLength(LengthPolicy):
    """Drafts in two rounds, then not in two; notes what is unread, and for which score."""

    def __init__(self, session: ReadingSession) -> None:
        super().__init__()
        self.unread: dict[int, int] = {}
        self._session = session
        self._n_rounds_started = 0

    def start_round(self, n_max: int, n_unread: int) -> Action:
        self._n_rounds_started += 1
        action = super().start_round(n_max if self._n_rounds_started % 4 in (1, 2) else 0, n_unread)
        if action is Action.DRAFT:
            self.unread[len(self._session.n_read)] = n_unread
        return action


def test_the_policy_knows_what_the_draft_model_has_not_read() -> None:
    """After rejected drafts, complete ones, and rounds without."""
    script = list(range(2, 29))
    wrong = [*script[:-1], 29]
    draft = ReadingSession(scripted_logits(wrong, N_VOCAB), held=[1])
    policy = SometimesLength(draft)
    run(FakeSession(scripted_logits(script, N_VOCAB)), "model", draft=draft, policy=policy)
    assert set(policy.unread.values()) >= {1, 2, 3}
    assert policy.unread == {i: draft.n_read[i] for i in policy.unread}


def test_drafts_have_the_targets_temperature_unless_a_rule_prefers_the_likeliest_token() -> None:
    assert CheckedOptions.of({}).draft_temperature is None
    assert CheckedOptions.of({"draft_temperature": 0.3}).draft_temperature == 0.3
    assert CheckedOptions.of({"verify": "match"}).draft_temperature == 0
    assert CheckedOptions.of({"verify": "match", "draft_temperature": 1}).draft_temperature == 1
