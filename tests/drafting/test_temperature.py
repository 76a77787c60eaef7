"""The draft's temperature is learned from what the target thought of each round."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeSession, speculated

from ggufspec import _native
from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Rows, Sampling, to_probs
from ggufspec.decoding.types import Draft
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.temperature import DraftTemperature
from ggufspec.errors import OptionError

N_VOCAB = 30
OPEN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([3, *prefix[-2:]]).normal(0, 2.0, N_VOCAB)


def mean_length(
    draft_scale: float, draft_temperature: float | str, rule: str = "traversal"
) -> float:
    """Tokens a pass with a draft whose logits are the target's, scaled."""
    target = FakeSession(logits_after)
    session = FakeSession(lambda prefix: logits_after(prefix) * draft_scale)
    verify_uniforms, draft_uniforms = uniform_streams(5)
    materials = drafters.Materials(
        OPEN, draft_uniforms, (), session, draft_temperature=draft_temperature
    )
    tokens = [1, 2]
    rounds = list(
        speculated(
            tokens,
            target=target,
            drafter=drafters.make("model", materials),
            verify=verify.rule(rule),
            sampling=OPEN,
            uniforms=verify_uniforms,
            n_draft=4,
            n_end=602,
        )
    )
    return 600 / len(rounds)


@pytest.mark.parametrize("scale", [0.4, 0.625, 1.0, 1.6])
def test_auto_finds_the_temperature_that_makes_up_for_a_draft(scale: float) -> None:
    """A draft that is too sure of itself has to be drawn warmer, one that is not, colder."""
    at_targets, auto = mean_length(scale, 1.0), mean_length(scale, "auto")
    assert auto > at_targets * (0.99 if scale == 1.0 else 1.15)
    assert auto > 0.9 * mean_length(scale, scale)


@pytest.mark.parametrize("scale", [0.4, 1.0, 1.6])
def test_auto_keeps_up_with_the_better_of_likeliest_and_as_the_target(scale: float) -> None:
    best = max(mean_length(scale, 0.0, "match"), mean_length(scale, 1.0))
    assert mean_length(scale, "auto") > 0.97 * best


def test_the_likeliest_token_is_chosen_where_it_is_the_best_guess() -> None:
    """A flat draft with the right most likely token, and a certain target."""
    rng = np.random.default_rng(1)
    draft_temperature = DraftTemperature(1.0)
    for _ in range(60):
        best = rng.integers(0, N_VOCAB, 4)
        target = to_probs((np.eye(N_VOCAB, dtype=np.float32)[best] * 9), OPEN, draft=[0] * 3)
        near = np.eye(N_VOCAB, dtype=np.float32)[best[:3]] * 0.5
        probs = to_probs(near, OPEN, draft=[0] * 2)
        draft_temperature.observe(
            Draft([probs.pick(i, rng.random()) for i in range(3)], probs), target
        )
    assert draft_temperature.choices[0] == 1.0
    drawn_at = set()
    for _ in range(8):
        drawn_at.add(draft_temperature.temperature)
        draft_temperature.observe(
            Draft([int(best[0])], np.eye(N_VOCAB, dtype=np.float32)[best[:1]]),
            np.eye(N_VOCAB, dtype=np.float32)[best[:2]],
        )
    assert 0.0 in drawn_at
    assert 1.0 in drawn_at  # now and then, to see whether that is still so


def test_the_expected_length_is_that_of_the_block_rule_or_a_little_less() -> None:
    """Estimates from rounds at temperature 1, averaged, against rounds really drawn at another."""
    rng = np.random.default_rng(2)
    base = rng.normal(0, 1.5, (4, 6)).astype(np.float32)
    target = to_probs(base, OPEN, draft=[0] * 3)
    near = (base[:3] + rng.normal(0, 1, (3, 6))).astype(np.float32)

    def draws(temperature: float, n: int) -> list[Draft]:
        sampling = Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        probs = to_probs(near, sampling, draft=[0] * 2)
        return [Draft([probs.pick(i, rng.random()) for i in range(3)], probs) for _ in range(n)]

    traversal = verify.rule("traversal")
    drafts = draws(1.0, 20_000)
    estimates = np.array(
        [_native.expected_lengths(target, d.probs, d.tokens, 3, [0.6, 1.5]) for d in drafts]
    )
    for i, temperature in enumerate((0.6, 1.5)):
        real = [traversal(d, target, rng.random(4)).n_accepted for d in draws(temperature, 20_000)]
        # Standard errors: 0.008 of what is real, about 0.01 of the estimates.
        assert -0.25 < estimates[:, i].mean() - np.mean(real) < 0.04


def test_a_greedy_target_and_a_fixed_temperature_learn_nothing() -> None:
    assert DraftTemperature(0.0).temperature == 0
    assert not DraftTemperature(0.0).is_learning
    assert DraftTemperature(0.8, 0.3).choices == (0.3,)
    assert not DraftTemperature(0.8, 0.3).is_learning


@pytest.mark.parametrize("samplers", [("temperature", "top_k"), ("top_k",), ()])
def test_where_temperature_is_not_the_last_step_the_targets_is_kept(
    samplers: tuple[str, ...],
) -> None:
    sampling = Sampling(temperature=0.7, samplers=samplers)
    materials = drafters.Materials(sampling, uniform_streams(0)[1], (), FakeSession(logits_after))
    drafter = drafters.make("model", materials)
    assert drafter.notes() == {"draft_temperature": 0.7}  # type: ignore[attr-defined]
    for _ in range(30):
        draft = drafter.draft([1, 2], 3)
        logits = np.array([logits_after((1, i)) for i in range(len(draft.tokens) + 1)], np.float32)
        target = to_probs(logits, sampling, [1, 2], draft.tokens)
        drafter.observe(draft, target, verify.rule("traversal")(draft, target, [0.5] * len(target)))
    assert drafter.notes() == {"draft_temperature": 0.7}  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), "warm"])
def test_a_temperature_that_is_none_is_refused(wrong: float | str) -> None:
    with pytest.raises(OptionError, match="draft_temperature"):
        DraftTemperature(1.0, wrong)


def test_a_draft_of_forced_tokens_alone_teaches_nothing() -> None:
    """The draft model was asked behind them, and its token was not drawn."""
    temperature = DraftTemperature(1.0, "auto")
    before = temperature.temperature
    rows = Rows(1, N_VOCAB)
    rows.append_certain(4)
    for _ in range(10):
        target = to_probs(
            np.array([logits_after((1,)), logits_after((4,))], np.float32), OPEN, (), [4]
        )
        temperature.observe(Draft([4], rows), target)
    assert temperature.temperature == before
