"""Prints how much faster trees are than chains, by acceptance and by the cost of passes.

    python -m tests.benchmarks.when_trees_pay

The loop, the drafter and the policy are the real ones, at temperature 0; the models are made up. In
each place the draft's first choice is right with one probability, and where it is wrong, its second
one is with another. Passes cost as stated, in passes over one token.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections.abc import Sequence

import numpy as np

from ggufspec.decoding import verify as rules
from ggufspec.decoding.loop import speculate, timed
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.tree import path_to
from ggufspec.decoding.types import Ask, Logits, Round
from ggufspec.drafting import strategies
from tests.benchmarks.replay import N_MOST, Costs
from tests.benchmarks.stated_costs import StatedCosts, StatedProfile

_N_VOCAB = 32
_N_CONTEXT = 3  # tokens that decide what follows, beside the place in the text
_LOGITS = (4.0, 2.0, 1.0)  # of the likeliest tokens, in every place


class MadeUpModel:
    """Ranks tokens by a hash of what is before them. The draft's first choice is its rank 0."""

    def __init__(self, first: float = 1.0, second: float = 1.0) -> None:
        """The target's: how often it agrees with the draft's first choice, else with the second."""
        self._first, self._second = first, second

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        parents = parents or range(-1, len(draft) - 1)
        paths = [path_to(parents, node) for node in range(-1, len(draft))]
        end = tuple(tokens[-_N_CONTEXT:])
        rows = np.zeros((len(paths), _N_VOCAB), np.float32)
        for row, path in zip(rows, paths, strict=True):
            before = (*end, *(draft[node] for node in path))[-_N_CONTEXT:]
            rng = random.Random(hash((len(tokens) + len(path), before)))
            ranks = rng.sample(range(_N_VOCAB), len(_LOGITS))
            if rng.random() >= self._first:
                is_second = rng.random() < self._second
                ranks = ranks[1:] + ranks[:1] if is_second else ranks[2:] + ranks[:2]
            row[ranks] = _LOGITS
        return rows


def speed(first: float, second: float, costs: Costs, tree: str, n_tokens: int) -> float:
    """Tokens per pass over one token."""
    stated = StatedCosts(costs)
    policy = StatedProfile(stated).policy(0.0, repeats=False, in_blocks=False)
    sampling = Sampling(temperature=0.0)
    verify_uniforms, draft_uniforms = uniform_streams(0)
    materials = strategies.Materials(
        sampling,
        draft_uniforms,
        (),
        MadeUpModel(),
        tree=tree,
        n_leaves=N_MOST,
        policy=policy,
    )
    target, tokens = MadeUpModel(first, second), array("i", [0])
    steps = speculate(
        tokens,
        drafter=strategies.make("model", materials),
        verify=rules.rule("rejection"),
        sampling=sampling,
        uniforms=verify_uniforms,
        n_draft=N_MOST,
        n_end=n_tokens,
    )
    for step in steps:
        assert isinstance(step, Ask)
        round_ = steps.send(timed(target, step))
        assert isinstance(round_, Round)
        policy.observe_round(round_)
    return (len(tokens) - 1) / stated.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each probability of the second choice."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.when_trees_pay")
    add = parser.add_argument
    add("--first", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9])
    add("--second", type=float, nargs="+", default=[0.25, 0.5])
    add("--eight", type=float, nargs="+", default=[1.05, 1.25, 1.5, 2, 3])
    add("--step", type=float, default=0.05, help="a draft step; default: %(default)s")
    add("--tokens", type=int, default=20_000, help="of a text")
    options = parser.parse_args(arguments)
    for second in options.second:
        sys.stdout.write(
            f"Where the first choice is wrong, the second is right in {second:.0%} of places.\n"
            "first choice   cost of a pass over 8 tokens\nis right    "
            + "".join(f"{eight:>8g}" for eight in options.eight)
            + "\n"
        )
        for first in options.first:
            sys.stdout.write(f"{first:<12.0%}")
            for eight in options.eight:
                slope = (eight - 1) / 7
                passes = {1: 1000.0, N_MOST + 1: 1000 * (1 + N_MOST * slope)}
                costs = Costs(passes, options.step * 1000, options.step * 100)
                tree, chain = (
                    speed(first, second, costs, tree, options.tokens) for tree in ("auto", "off")
                )
                sys.stdout.write(f"{tree / chain - 1:>+8.1%}")
                sys.stdout.flush()
            sys.stdout.write("\n")


if __name__ == "__main__":
    main()
