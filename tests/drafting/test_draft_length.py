"""The chosen length is never much slower than the best fixed one, or than plain decoding."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fakes import FakeSession, drafter_of, hashed_logits, known_costs, of_last_two, speculated

from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Round
from ggufspec.drafting.cost_model import CostModel, Start
from ggufspec.drafting.draft_length import Action, Coefficients, LengthPolicy

N_VOCAB = 60
N_MOST = 16
N_TOKENS = 1500  # of a text that is drawn: with fewer, luck decides
PRIOR = (0.4, 2.0)
CURVES = {  # seconds of a pass over 1, 2 ... tokens
    # Kernels of four rows.
    "stairs": [3.6, 5.8, 8.3, 5.5, 8, 10.4, 10.2, 10, 11.2, *(12.4 + 0.75 * n for n in range(8))],
    "flat": [20 + 0.4 * n for n in range(17)],
    # Of a mixture of experts on a GPU (ik_llama.cpp#1630): two tokens take longer than two passes.
    "experts": [5.9, 17.9, 20.4, 22.9, 24.7, 26.5, 28.3, 30.1, *(32.1 + 2 * n for n in range(9))],
}


@functools.cache
def near(noise: float) -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    """A target and a draft that is right more or less often, from place to place."""

    target = hashed_logits(N_VOCAB, 1)

    def draft(last: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([2, *last])
        return target(last) + rng.normal(0, noise * rng.random(), N_VOCAB)

    return target, of_last_two(draft)


def random_logits(seed: int) -> Callable[..., np.ndarray]:
    """Two of them are equally sure of themselves, of different things."""
    return hashed_logits(N_VOCAB, seed, 6.0)


def chosen(
    curve: Sequence[float], step: float, prior: Coefficients = PRIOR, block_bonus: float = 0.0
) -> LengthPolicy:
    costs = known_costs(curve, step, n_most=N_MOST + 1)
    return LengthPolicy(costs, prior, block_bonus=block_bonus)


def rounds_of(
    logits: tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]],
    policy: LengthPolicy,
    *,
    drafter: str = "model",
    n_draft: int = N_MOST,
    temperature: float = 0.0,
    n_tokens: int = 400,
    observe: Callable[[Round], None] = lambda round_: None,
) -> list[Round]:
    sampling = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0)
    how = {"sampling": sampling, "n_draft": n_draft}
    rounds = []
    for round_ in speculated(
        array("i", [1, 2]),
        target=FakeSession(logits[0]),
        drafter=drafter_of(drafter, FakeSession(logits[1]), policy=policy, **how),
        n_tokens=n_tokens,
        **how,
    ):
        observe(round_)
        rounds.append(round_)
    return rounds


def seconds_of(
    curve: Sequence[float], step: float, policy: LengthPolicy, **options: object
) -> float:
    """What a text costs by the curve, with all that is asked of the draft."""
    seconds = 0.0

    def observe(round_: Round) -> None:
        nonlocal seconds
        seconds += curve[round_.n_drafted] + step * policy.n_evaluated
        policy.observe_round(round_)

    rounds_of(policy=policy, observe=observe, **options)  # type: ignore[arg-type]
    return seconds


@functools.cache
def lengths_of_fixed(n_draft: int, temperature: float) -> list[int]:
    """The drafted tokens of each round: the same for all curves."""
    rounds = rounds_of(
        near(1.5), LengthPolicy(), n_draft=n_draft, temperature=temperature, n_tokens=N_TOKENS
    )
    return [round_.n_drafted for round_ in rounds]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", CURVES)
def test_the_chosen_length_is_as_good_as_the_best_fixed_one(shape: str, temperature: float) -> None:
    curve, logits = CURVES[shape], near(1.5)
    step = 0.03 * curve[0]
    fixed = [
        sum(curve[n] + step * n for n in lengths_of_fixed(n_most, temperature))
        for n_most in (1, 2, 3, 5, 8, 15)
    ]
    policy = chosen(curve, step, block_bonus=0.07 if temperature else 0.0)
    auto = seconds_of(
        curve, step, policy, logits=logits, temperature=temperature, n_tokens=N_TOKENS
    )
    assert auto < 1.07 * min(fixed)
    assert auto < 1.03 * N_TOKENS * curve[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_a_draft_that_is_always_wrong_costs_next_to_nothing(
    drafter: str, temperature: float
) -> None:
    curve = CURVES["stairs"]
    logits = (random_logits(1), random_logits(2))
    options = {"logits": logits, "temperature": temperature, "drafter": drafter}
    policy = chosen(curve, 0.03 * curve[0])
    assert seconds_of(curve, 0.03 * curve[0], policy, **options) < 1.03 * 400 * curve[0]
    if drafter == "model":
        assert "drafting did not help" in (policy.advice() or "")


def test_a_draft_that_is_too_slow_gets_advice() -> None:
    curve = CURVES["flat"]
    policy = chosen(curve, 1.1 * curve[0])
    seconds = seconds_of(curve, 1.1 * curve[0], policy, logits=near(3.0))
    assert seconds < 1.05 * 400 * curve[0]
    assert "drafting cannot help: one draft token costs 1.10x a target pass" in (
        policy.advice() or ""
    )


def test_advice_without_any_draft_tells_what_is_expected() -> None:
    policy = chosen([1.0, 1.9, 2.8, 3.7], 0.05, prior=(0.0, 0.0))
    for _ in range(100):
        assert policy.start_round(3, 1) is Action.SKIP
        policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
    advice = policy.advice() or ""
    assert "an estimated 50% of draft tokens would be accepted" in advice
    assert "2: 1.9, 4: 3.7" in advice


def test_drafting_resumes_when_the_text_changes() -> None:
    """A draft that is wrong for 200 tokens, and right from then on."""
    target, other = random_logits(1), random_logits(2)

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        return other(prefix) if len(prefix) < 200 else target(prefix)

    curve = CURVES["stairs"]
    policy = chosen(curve, 0.03 * curve[0])
    lengths: list[int] = []

    def observe(round_: Round) -> None:
        policy.observe_round(round_)
        lengths.extend([round_.n_drafted] * len(round_.tokens))

    rounds_of((target, draft), policy, observe=observe, n_tokens=900)
    assert sum(n == 0 for n in lengths[100:200]) > 90
    assert sum(n > 0 for n in lengths[800:]) > 60


def test_the_expected_number_is_accepted_on_average() -> None:
    curve = CURVES["stairs"]
    policy = chosen(curve, 0.1)
    rounds = rounds_of(
        near(1.5), policy, temperature=1.0, n_tokens=1500, observe=policy.observe_round
    )
    expected = sum(round_.expected or 0.0 for round_ in rounds)
    assert sum(round_.n_accepted for round_ in rounds) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_distributions_that_were_not_drawn_from_are_learned_from(temperature: float) -> None:
    """A draft whose tokens were thought hopeless: it is evaluated, and nothing is drawn."""
    curve = [1.0, 1.3, *(1.3 + 0.3 * n for n in range(1, N_MOST))]
    policy = chosen(curve, 1e-6, prior=(-3.0, 1.0))
    rounds = rounds_of(
        near(0.0), policy, temperature=temperature, n_tokens=60, observe=policy.observe_round
    )
    assert rounds[0].n_drafted == 0
    assert rounds[0].why == "the draft model is uncertain about the next token"
    assert policy.acceptance.probability(1.0) > 0.8
    assert rounds[-2].n_drafted > 0


@pytest.mark.parametrize("gap", [0.1, 8.0], ids=["prose", "code"])
def test_the_targets_own_gaps_decide_without_a_draft_step(gap: float) -> None:
    """The text changes from one kind to the other; the draft model is asked for nothing."""
    policy = chosen([1.0, 1.5, 2.0, 2.5], 0.3, prior=(-0.5, 1.0))
    other = 8.1 - gap
    for after, n_tokens in ((other, 40), (gap, 16)):
        policy.observe_gaps([after] * n_tokens)
        policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
    wanted = Action.DRAFT if gap > 4 else Action.SKIP
    assert policy.start_round(3, 1) is wanted


@pytest.mark.parametrize(("each_further", "pays"), [(0.02, True), (0.9, False)])
def test_prompts_are_read_ahead_where_texts_share_passes_only_if_it_pays(
    each_further: float, pays: bool
) -> None:
    costs = CostModel(4, n_sharers=4)
    for n in range(1, 17):
        costs.observe_target(n, 1.0 + each_further * (n - 1))
    costs.observe_draft(1, 0.05)
    policy = LengthPolicy(costs, (3.0, 0.1))
    assert policy.begin_text(2, 100)
    policy.set_n_sharers(4)
    assert policy.begin_text(2, 100) == pays
    assert not policy.begin_text(100_000, 100)


def reading() -> LengthPolicy:
    """Drafts save 0.8 s a token; the draft model takes 0.1 s for each token of a prompt."""
    policy = chosen([1.0] * 4, 0.1, prior=(3.0, 0.0))
    policy.costs.is_frozen = False
    policy.costs.observe_draft(1, 0.1 + 100 * 0.1, n_further=100)
    return policy


def test_a_prompt_is_read_ahead_if_that_pays_for_the_text_that_is_usual() -> None:
    policy = reading()
    assert policy.begin_text(1000, 2000)
    assert not policy.begin_text(1000, 50), "so short a text saves less"
    assert not policy.begin_text(10_000, 2000)
    assert LengthPolicy().begin_text(10**6, 1), "a fixed length does not weigh costs"


def test_a_prompt_that_was_not_read_is_read_once_the_text_is_long() -> None:
    policy = reading()
    n_prompt = 3000
    assert not policy.begin_text(n_prompt, 5000)
    n_written, balance = 0, policy.costs.balance
    while policy.start_round(3, n_prompt + 1 + n_written) is not Action.DRAFT:
        assert "reading the text" in policy.why
        policy.observe_round(Round([1], 0, 0, 0.0, 1.0, 0.0))
        n_written += 1
    assert n_written == pytest.approx(0.1 * n_prompt / 0.8, rel=0.15)
    assert policy.advice() is None, "that its prompt is long says nothing of the pair"
    assert policy.should_evaluate()
    policy.should_draw(5.0)
    policy.observe_round(Round([1], 1, 0, 0.1 * n_prompt, 1.0, 0.0))
    assert policy.costs.balance > balance - 2, "the balance does not pay for the prompt"
    policy.start_round(3, 2)
    assert policy.n_prompt_unread == 0


def test_plain_decoding_is_measured_before_anything_is_compared_with_it() -> None:
    policy = LengthPolicy(CostModel(N_MOST + 1), PRIOR)
    rounds = rounds_of(near(0.0), policy, n_tokens=30, observe=policy.observe_round)
    assert [round_.n_drafted for round_ in rounds[:2]] == [0, 0]
    assert rounds[0].why == "plain decoding is being measured"
    assert rounds[2].n_drafted > 0


@pytest.mark.parametrize(("step", "drafts"), [(0.002, True), (0.06, False)])
def test_a_device_that_compiles_at_first_drafts_at_once_where_that_pays(
    step: float, drafts: bool
) -> None:
    curve = [0.04 + 0.001 * n for n in range(N_MOST + 1)]
    policy = LengthPolicy(CostModel(N_MOST + 1, start=Start(curve, 0.002, 0.001)), PRIOR)
    seen: set[str] = set()

    def compiled(what: str) -> float:
        seen.add(what)
        return 0.3

    def observe(round_: Round) -> None:
        size, n_steps = f"pass {round_.n_drafted}", policy.n_evaluated
        target = curve[round_.n_drafted] + (0.0 if size in seen else compiled(size))
        draft = n_steps * step
        if n_steps:
            draft += 0.0 if "step" in seen else compiled("step")
        policy.observe_round(round_._replace(target_seconds=target, draft_seconds=draft))

    rounds = rounds_of(near(0.5), policy, n_tokens=100, observe=observe)
    lengths = [round_.n_drafted for round_ in rounds]
    assert lengths[:5] == [0, 0, 0, 1, 1], "of each, the first is not measured"
    assert (lengths[5] >= 4) == drafts
    assert any(lengths[5:]) == drafts


def shared_lengths(policy: LengthPolicy, n_sharers: int) -> list[int]:
    policy.set_n_sharers(n_sharers)
    return [round_.n_drafted for round_ in rounds_of(near(0.0), policy, n_tokens=200)][4:-1]


MEASURED = (1.0, 0.5)


def flat_up_to_16() -> CostModel:
    """Passes that take a second, and one more for each token beyond 16."""
    costs = CostModel(N_MOST + 1, n_sharers=8)
    for n in range(1, 8 * (N_MOST + 1) + 1):
        costs.observe_target(n, 1.0 + max(n - 16, 0))
    costs.observe_target(1, 1.0)
    costs.observe_plain(1.0)
    costs.observe_draft(1, 1e-4)
    return costs


def test_the_more_texts_share_a_pass_the_shorter_are_drafts_where_it_grows_with_them() -> None:
    lengths = {n: shared_lengths(LengthPolicy(flat_up_to_16(), MEASURED), n) for n in (1, 4, 8)}
    assert min(lengths[1]) > 8
    assert set(lengths[4]) <= {2, 3}, "four times four tokens are sixteen"
    assert set(lengths[8]) <= {0, 1}
    costs = flat_up_to_16()
    costs.is_frozen = True  # of a text with a seed, which others do not change
    assert shared_lengths(LengthPolicy(costs, MEASURED), 8) == lengths[1]


def test_a_shared_pass_does_not_update_the_cost_of_a_single_text() -> None:
    costs = flat_up_to_16()
    policy = LengthPolicy(costs, MEASURED)
    before = list(costs.curve)
    policy.observe_round(Round([1], 0, 0, 0.0, 50.0, 0.0, n_sharers=4))
    assert list(costs.curve) == before
    policy.observe_round(Round([1], 0, 0, 0.0, 50.0, 0.0))
    assert list(costs.curve) != before


def test_a_round_with_a_prefix_forgets_why_the_round_before_skipped_drafting() -> None:
    curve = [1.0 + 0.05 * n for n in range(N_MOST + 1)]
    hopeless = (-20.0, 0.0)
    policy = chosen(curve, 0.04, prior=hopeless)
    assert policy.start_round(N_MOST, 1) is Action.SKIP
    assert policy.why == "drafting would not be faster"
    assert policy.prefix_length([0.9] * 4).n_draft == 4
    assert policy.why == ""
    for _ in range(100):  # rounds of n-grams did not skip drafting
        policy.prefix_length([0.9] * 4)
        policy.observe_round(Round([1] * 5, 4, 4, 0.0, 1.2, 0.0, expected=3.4))
    assert policy.advice() is None


@pytest.mark.parametrize("forced", [[], [0.95] * 3, [0.5]], ids=str)
def test_a_draft_behind_forced_text_beats_the_model_where_it_would_do_so_alone(
    forced: list[float],
) -> None:
    fixed = LengthPolicy()
    assert fixed.prefix_length([0.9] * 4, forced).beats_model
    assert not fixed.prefix_length([], forced).beats_model
    assert fixed.prefix_length([], forced).n_draft == len(forced)
    for _ in range(20):
        fixed.observe_verdict(2, [])  # the draft model brings two tokens a round
    assert fixed.prefix_length([0.9] * 4, forced).beats_model
    assert not fixed.prefix_length([0.9] * 2, forced).beats_model
    curve = [1.0 + 0.02 * n for n in range(N_MOST + 1)]
    policy = chosen(curve, 0.1, prior=(2.0, 0.0))
    assert policy.prefix_length([0.95] * 10, forced).beats_model
    assert not policy.prefix_length([0.6] * 3, forced).beats_model
    assert policy.prefix_length([0.6] * 3, forced).n_draft > len(forced)
    expected = policy.prefix_length([0.6], forced).expected
    assert expected == pytest.approx(sum(np.cumprod([*forced, 0.6])))
