"""The loop writes what the target alone would have written, in fewer passes, and knows its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import FakeSession, hashed_logits, scripted_logits, speculated

from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Draft, Drafter, Probs, Round, Verdict
from ggufspec.drafting import strategies as drafters
from ggufspec.errors import OptionError

N_VOCAB = 12
GREEDY = Sampling(temperature=0)


def run(
    target: FakeSession,
    drafter: Drafter,
    prompt: Sequence[int] = (1, 2),
    *,
    sampling: Sampling = GREEDY,
    n_draft: int = 4,
    n_tokens: int = 40,
    rule: str = "rejection",
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
) -> tuple[list[int], list[Round]]:
    tokens = list(prompt)
    rounds = list(
        speculated(
            tokens,
            target=target,
            drafter=drafter,
            verify=verify.rule(rule),
            sampling=sampling,
            uniforms=uniform_streams(seed)[0],
            n_draft=n_draft,
            n_end=len(prompt) + n_tokens,
            stop_tokens=stop_tokens,
        )
    )
    return tokens[len(prompt) :], rounds


def model_drafter(
    logits_after: Callable[..., np.ndarray],
    sampling: Sampling = GREEDY,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
) -> Drafter:
    session = FakeSession(logits_after)
    return drafters.make(
        "model", drafters.Materials(sampling, uniform_streams(seed)[1], stop_tokens, session)
    )


def no_drafter() -> Drafter:
    return drafters.make("none", drafters.Materials(GREEDY, uniform_streams(0)[1], ()))


@pytest.mark.parametrize("rule", verify.names())
@pytest.mark.parametrize("n_draft", [1, 7])
def test_greedy_text_is_that_of_plain_decoding(rule: str, n_draft: int) -> None:
    plain, _ = run(FakeSession(hashed_logits(N_VOCAB, 1)), no_drafter())
    for draft_seed in (1, 2):  # the same model, and one that is nearly always wrong
        target = FakeSession(hashed_logits(N_VOCAB, 1))
        drafter = model_drafter(hashed_logits(N_VOCAB, draft_seed))
        text, rounds = run(target, drafter, n_draft=n_draft, rule=rule)
        assert text == plain
        if draft_seed == 1:
            assert all(round_.n_accepted == round_.n_drafted for round_ in rounds)
            assert target.n_scores == -(-40 // (n_draft + 1))


@pytest.mark.parametrize("n_tokens", [1, 2, 8])
def test_exactly_the_wanted_tokens_are_decoded(n_tokens: int) -> None:
    target = FakeSession(hashed_logits(N_VOCAB, 1), n_ctx=2 + n_tokens)
    drafter = model_drafter(hashed_logits(N_VOCAB, 1))
    text, rounds = run(target, drafter, n_draft=3, n_tokens=n_tokens)
    assert len(text) == n_tokens == sum(len(round_.tokens) for round_ in rounds) == target.n_rows


@pytest.mark.parametrize("stop_at", [1, 5, 6])
def test_a_stop_token_inside_a_draft_ends_the_text_there(stop_at: int) -> None:
    script = [5, 5, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4]
    script[1 + stop_at] = 9
    logits = scripted_logits(script, N_VOCAB)
    drafter = model_drafter(logits, stop_tokens=(9,))
    text, rounds = run(FakeSession(logits), drafter, n_draft=4, stop_tokens=(9,))
    assert text == script[2 : 2 + stop_at]
    assert text[-1] == 9
    # Nothing is drafted behind the stop token.
    assert sum(round_.n_drafted for round_ in rounds) <= len(text)


def test_a_draft_that_runs_past_a_stop_token_is_cut() -> None:
    class Eager:
        def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
            return Draft([3, 9, 3, 4][:n_max])

        def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None: ...

    logits = scripted_logits([0, 0, 3, 9, 3, 4], N_VOCAB)
    text, rounds = run(FakeSession(logits), Eager(), stop_tokens=(9,))
    assert text == [3, 9]
    assert (rounds[-1].n_drafted, rounds[-1].n_accepted) == (4, 2)


def test_the_drafter_gets_every_verdict_and_only_the_text() -> None:
    heard: list[tuple[tuple[int, ...], int, int]] = []

    class Recorder:
        def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
            self.tokens = tuple(tokens)
            return Draft([len(tokens) % N_VOCAB] * min(2, n_max))

        def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
            heard.append((self.tokens, len(draft.tokens), verdict.n_accepted))

    text, rounds = run(FakeSession(hashed_logits(N_VOCAB, 1)), Recorder(), n_tokens=12)
    assert len(heard) == len(rounds)
    written = [1, 2, *text]
    assert all(list(tokens) == written[: len(tokens)] for tokens, _, _ in heard)


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    sampling = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0)

    def text(seed: int) -> list[int]:
        drafter = model_drafter(hashed_logits(N_VOCAB, 2), sampling, seed=seed)
        target = FakeSession(hashed_logits(N_VOCAB, 1))
        return run(target, drafter, sampling=sampling, seed=seed)[0]

    assert text(3) == text(3) != text(4)


def test_drafters_are_found_by_file_name() -> None:
    assert {"auto", "forced", "model", "ngram", "none", "staged"} == set(drafters.names())
    materials = drafters.Materials(GREEDY, uniform_streams(0)[1], ())
    with pytest.raises(OptionError, match="choose from auto, forced, model, ngram, none"):
        drafters.make("oracle", materials)
    with pytest.raises(OptionError, match="needs a draft model"):
        drafters.make("model", materials)


class OneThenTwo:
    """A constraint: only the text 1 2, then a token that ends it."""

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> np.ndarray:
        n = len(tokens) - 2
        return np.array([[1 << (1, 2, 0)[i]] for i in range(n, n + len(draft) + 1)], np.uint32)

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return len(draft)

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        return (1, 2)[len(tokens) - 2 :]

    def n_free(self, tokens: Sequence[int]) -> int:
        return 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        return list(tokens[2:]) == [1, 2]


class WholeText:
    """Drafts all that OneThenTwo allows."""

    def draft(self, tokens: Sequence[int], n: int) -> Draft:
        return Draft((1, 2)[len(tokens) - 2 :])

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        pass


def test_a_text_that_a_constraint_ends_has_the_same_tokens_with_a_draft() -> None:
    sampling = Sampling(temperature=0, constraint=OneThenTwo())
    nothing = drafters.make("none", drafters.Materials(sampling, uniform_streams(0)[1], [0], None))
    for drafter in (nothing, WholeText()):
        target = FakeSession(hashed_logits(N_VOCAB, 0))
        assert run(target, drafter, (3, 3), sampling=sampling, stop_tokens=[0])[0] == [1, 2]
