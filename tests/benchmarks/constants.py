"""Simulates the effect of each tuned number of drafting: seconds with it halved and doubled.

    python -m tests.benchmarks.constants [NAME ...]

Texts are generated with models that cost nothing; passes and draft steps are charged by cost curves
of real kernels. Texts are random: the last column is the standard error.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, stdev

import numpy as np

from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Round
from ggufspec.drafting import constants, strategies
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.pair_profile import PairProfile
from tests.fakes import FakeSession, speculated

CURVES = {  # milliseconds of a pass over 1, 2, 3, 4, 6, 8, 12, 16 tokens
    "stairs": (3.6, 5.8, 8.3, 5.5, 10.4, 10.0, 14.7, 17.1),
    "flat": (20.0, 20.4, 20.8, 21.2, 22.0, 22.8, 24.4, 26.0),
}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
NOISES = (0.5, 1.5, 4.0)  # of the draft's logits: nearly always right, often, seldom
STEP = 0.04  # of a pass over one token
N_TOKENS, N_VOCAB, N_SEEDS, N_DRAFT = 160, 40, 3, 15


def main(names: Sequence[str]) -> None:
    """Print a line for each constant: seconds over those with its value, and the standard error."""
    base = seconds()
    sys.stdout.write(f"{'constant':28} {'halved':>8} {'doubled':>8} {'error':>7}\n")
    for name in names or [name for name in vars(constants) if _is_number(name)]:
        row = []
        for factor in (0.5, 2.0):
            with changed(name, factor):
                ratios = [new / old for new, old in zip(seconds(), base, strict=True)]
            row.append((mean(ratios), stdev(ratios) / len(ratios) ** 0.5))
        error = max(each[1] for each in row)
        sys.stdout.write(f"{name:28} {row[0][0]:8.3f} {row[1][0]:8.3f} {error:7.3f}\n")
        sys.stdout.flush()


def _is_number(name: str) -> bool:
    unused = name.startswith(("TEMPERATURE", "N_TEMPERATURE", "MAX_SIZE", "NGRAM"))
    return name.isupper() and not unused and isinstance(vars(constants)[name], (int, float))


@contextmanager
def changed(name: str, factor: float) -> Iterator[None]:
    """The constant times `factor`; shares stay below 1, counts stay whole and positive."""
    before = vars(constants)[name]
    after = before * factor
    if isinstance(before, int):
        after = max(round(after), 1)
    elif "KEEP" in name or "MARGIN" in name or name.startswith("MIN_DISCOUNT"):
        after = 1 - (1 - before) * factor
    setattr(constants, name, after)
    try:
        yield
    finally:
        setattr(constants, name, before)


def seconds() -> list[float]:
    """The seconds of texts with all curves, noises, temperatures and seeds."""
    return [
        text_seconds(curve, noise, temperature, seed)
        for curve in CURVES.values()
        for noise in NOISES
        for temperature in (0.0, 1.0)
        for seed in range(N_SEEDS)
    ]


def text_seconds(measured: Sequence[float], noise: float, temperature: float, seed: int) -> float:
    """The seconds of one text of a new pair, with costs learned during generation."""
    curve = np.interp(range(1, N_DRAFT + 2), SIZES, measured)
    rng = np.random.default_rng(seed)
    policy = PairProfile(CostModel(N_DRAFT + 1)).policy(temperature, repeats=False, in_blocks=True)

    def target(prefix: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *prefix[-2:]]).normal(0, 2.0, N_VOCAB)

    def draft(prefix: tuple[int, ...]) -> np.ndarray:
        local = np.random.default_rng([seed + 1000, *prefix[-2:]])
        return target(prefix) + local.normal(0, noise * local.random(), N_VOCAB)

    sampling = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0)
    verify_uniforms, draft_uniforms = uniform_streams(seed)
    materials = strategies.Materials(
        sampling, draft_uniforms, (), FakeSession(draft), n_draft_max=N_DRAFT, policy=policy
    )
    total = 0.0
    rounds: Iterator[Round] = speculated(
        array("i", [1, 2]),
        target=FakeSession(target),
        drafter=strategies.make("model", materials),
        verify=verify.rule("block"),
        sampling=sampling,
        uniforms=verify_uniforms,
        n_draft=N_DRAFT,
        n_end=N_TOKENS + 2,
    )
    for round_ in rounds:
        target_seconds = float(curve[round_.n_drafted])
        draft_seconds = STEP * measured[0] * policy.rule.n_evaluated
        total += target_seconds + draft_seconds
        probed = policy.probe_seconds
        noisy = round_._replace(
            target_seconds=target_seconds * float(rng.lognormal(0, 0.05)),
            draft_seconds=draft_seconds or STEP * measured[0],
            verify_seconds=0.0,
        )
        policy.observe_round(noisy)
        total += policy.probe_seconds - probed
    return total


if __name__ == "__main__":
    main(sys.argv[1:])
