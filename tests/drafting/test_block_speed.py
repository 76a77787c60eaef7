"""With a head that drafts blocks, `auto` is as fast as the best fixed length, by simulated seconds.

A pass costs what a curve says, and a block what a step costs, whatever is drawn of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from fake_blocks import FakeBlocks, Rows
from fakes import FakeSession, hashed_logits, speculated

from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.drafting import strategies
from ggufspec.drafting.acceptance import Acceptance
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import LengthPolicy

N_VOCAB = 60
N_ROWS = 7  # of a block
N_TOKENS = 2000
SPREAD = 2.0  # of the target's logits
PART = 150  # tokens of a text that are alike
PRIOR = Acceptance((0.4, 2.0), (0.4, 2.0))
# Milliseconds of a pass over 1, 2 ... tokens: kernels of four rows, a nearly flat line, a mixture
# of experts, whose tokens each read others at first (as in test_draft_length.py).
CURVES = {
    "stairs": [3.6, 5.8, 8.3, 5.5, 8.0, 10.4, 10.2, 10.0, 11.2],
    "flat": [20.0 + 0.4 * n for n in range(9)],
    "experts": [5.9, 17.9, 20.4, 22.9, 24.7, 26.5, 28.3, 30.1, 32.1],
}


@functools.cache
def target_after(n: int, last: tuple[int, ...]) -> np.ndarray:
    found = np.random.default_rng([1, n, *last]).normal(0, SPREAD, N_VOCAB)
    found.setflags(write=False)
    return found


def target(prefix: tuple[int, ...]) -> np.ndarray:
    """Of the length, too: a text that repeats itself would be a matter of luck."""
    return target_after(len(prefix), prefix[-2:])


@functools.cache
def row(n: int, last: tuple[int, ...], place: int, noise: float) -> np.ndarray:
    """What a trained head knows along the target's likeliest tokens behind `last`.

    The target's logits, wrong from place to place: the less it knows, the less sure it is.
    """
    path = last
    for i in range(place):
        path = (path[-1], int(target_after(n + i, path).argmax()))
    random = np.random.default_rng([2, n, *last, place])
    deviation = noise * random.random()
    found = target_after(n + place, path) + random.normal(0, deviation, N_VOCAB)
    found *= SPREAD**2 / (SPREAD**2 + deviation**2)
    found.setflags(write=False)
    return np.asarray(found)


def near(noise: float, per_place: float = 0.0, in_parts: float = 1.0) -> Rows:
    """A head that is worse at each place of its block, and in every other part of a text."""

    def rows(known: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
        part = in_parts if len(known) // PART % 2 else 1.0
        return row(
            len(known), known[-2:], len(drafted), noise * part * (1 + per_place * len(drafted))
        )

    return rows


HEADS = {
    "worse by place": near(1.0, 0.3),
    "worse by part": near(0.8, 0.2, 2.0),
}


def useless(known: tuple[int, ...], drafted: tuple[int, ...]) -> np.ndarray:
    """Sure of something else."""
    return np.asarray(hashed_logits(N_VOCAB, 2, 6.0)((*known[-2:], *drafted)[-2:]))


def auto(curve: Sequence[float], step: float, temperature: float) -> LengthPolicy:
    costs = CostModel(len(curve), n_per_step=N_ROWS)
    for _ in range(3):
        for n, seconds in enumerate(curve):
            costs.observe_target(n + 1, seconds)
        costs.observe_draft(1, step)
    costs.is_frozen = True
    return LengthPolicy(costs, PRIOR, block_bonus=0.07 if temperature else 0.0)


def rounds_of(
    rows: Rows, policy: LengthPolicy, temperature: float, n_draft: int = N_ROWS
) -> list[tuple[int, int]]:
    """The drafted tokens of each round, and the blocks that it took; of sampled texts, of two."""
    return [
        round_
        for seed in ((4, 5) if temperature else (4,))
        for round_ in rounds_of_text(rows, policy, temperature, n_draft, seed)
    ]


def rounds_of_text(
    rows: Rows, policy: LengthPolicy, temperature: float, n_draft: int, seed: int
) -> Iterator[tuple[int, int]]:
    sampling = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0)
    verify_uniforms, draft_uniforms = uniform_streams(seed)
    tokens = [1, 2]
    materials = strategies.Materials(
        sampling,
        draft_uniforms,
        (),
        FakeBlocks(tokens, rows, N_ROWS),
        n_draft_max=N_ROWS,
        policy=policy,
        tree="off",
    )
    for round_ in speculated(
        tokens,
        target=FakeSession(target),
        drafter=strategies.make("model", materials),
        verify=verify.rule("traversal"),
        sampling=sampling,
        uniforms=verify_uniforms,
        n_draft=n_draft,
        n_end=2 + N_TOKENS,
    ):
        yield round_.n_drafted, math.ceil(policy.rule.n_evaluated / N_ROWS)
        policy.observe_round(round_)


def seconds_of(rounds: Sequence[tuple[int, int]], curve: Sequence[float], step: float) -> float:
    return sum(curve[n] + n_blocks * step for n, n_blocks in rounds)


@functools.cache
def rounds_of_fixed(head: str, n_draft: int, temperature: float) -> list[tuple[int, int]]:
    """The same for all curves."""
    return rounds_of(HEADS[head], LengthPolicy(), temperature, n_draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", CURVES)
def test_auto_is_as_fast_as_the_best_fixed_length(
    shape: str, head: str, temperature: float
) -> None:
    curve = CURVES[shape]
    step = 0.15 * curve[0]
    found = seconds_of(
        rounds_of(HEADS[head], auto(curve, step, temperature), temperature), curve, step
    )
    fixed = [seconds_of(rounds_of_fixed(head, n, temperature), curve, step) for n in (1, 3, 5, 7)]
    plain = N_TOKENS * curve[0] * (2 if temperature else 1)
    assert found < 1.05 * min(*fixed, plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("shape", CURVES)
def test_a_useless_head_costs_next_to_nothing(shape: str, share: float, temperature: float) -> None:
    curve = CURVES[shape]
    step = share * curve[0]
    policy = auto(curve, step, temperature)
    rounds = list(rounds_of_text(useless, policy, temperature, N_ROWS, seed=4))
    assert N_TOKENS * curve[0] / seconds_of(rounds, curve, step) > 0.97
