"""On recorded texts of a real pair, drafting gains where it can, and loses little elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import geometric_mean, mean, median

import pytest

from tests.benchmarks import replay

TEXTS = replay.load()
GREEDY = [text for text in TEXTS if text.temperature == 0]
LONG = 64  # tokens, from which hardly a text may take more than 3 % longer than plain decoding
HARDLY_PAYS = "AVX2 llama.cpp"  # four tokens cost 3.3 passes of one there
# Where drafts are dear: the share of texts that may take longer than that, and the worst speed-up.
DEAR = {"Q4_K_M": (0.04, 0.89), HARDLY_PAYS: (0.1, 0.9)}


@pytest.fixture(scope="module", params=replay.COSTS)
def found(request: pytest.FixtureRequest) -> tuple[str, Mapping[str, list[float]]]:
    return request.param, speedups(request.param)


@cache
def speedups(costs: str) -> Mapping[str, list[float]]:
    return replay.speedups(GREEDY, replay.COSTS[costs], without=("no model", "clairvoyant"))


def by_kind(values: Sequence[float], kind: str) -> float:
    return median(v for v, text in zip(values, GREEDY, strict=True) if text.kind == kind)


KINDS = sorted({text.kind for text in GREEDY})


def test_there_are_recordings_of_six_kinds() -> None:
    assert len(KINDS) == 6
    assert len(GREEDY) > 180


def test_no_kind_of_text_gets_slower(found: tuple[str, dict[str, list[float]]]) -> None:
    assert all(by_kind(found[1]["auto"], kind) >= 0.97 for kind in KINDS)


def test_hardly_a_long_text_gets_slower(found: tuple[str, dict[str, list[float]]]) -> None:
    long = [s for s, text in zip(found[1]["auto"], GREEDY, strict=True) if len(text) >= LONG]
    most, least = DEAR.get(found[0], (0.03, 0.94))
    assert sum(speedup < 0.97 for speedup in long) <= most * len(long)
    assert min(long) > least


def test_auto_is_ahead_of_every_fixed_setting(
    found: tuple[str, dict[str, list[float]]],
) -> None:
    means = {name: geometric_mean(values) for name, values in found[1].items()}
    fixed = [means[name] for name in means if name != "auto"]
    assert means["auto"] > (1.05 if found[0] == HARDLY_PAYS else 1.1) * max(fixed)


def test_the_first_text_of_a_new_pair_counts_like_any_other() -> None:
    costs = replay.COSTS["Q4_0"]
    plain = [len(text) * costs.curve[0] for text in GREEDY]
    first = [
        seconds / replay.Auto()(text, costs, random.Random(0))
        for text, seconds in zip(GREEDY, plain, strict=True)
    ]
    later = speedups("Q4_0")["auto"]
    assert geometric_mean(first) > 0.92 * geometric_mean(later)


@pytest.mark.parametrize(("first", "second"), [("writing", "code"), ("code", "writing")])
def test_a_change_of_kind_is_noticed_within_16_tokens(first: str, second: str) -> None:
    """Drafts are longer in code than in a story, in each 16 tokens before and after the change."""
    lengths: dict[str, list[int]] = {first: [], second: []}
    of_kind = {
        kind: [text for text in GREEDY if text.kind == kind and len(text) >= LONG]
        for kind in lengths
    }
    for one, other in zip(of_kind[first], of_kind[second], strict=False):
        auto = replay.Auto()
        auto(replay.joined(one, other, LONG), replay.COSTS["GPU"], random.Random(0))
        for position, n_drafted in auto.rounds:
            if LONG - 16 <= position < LONG + 32 and not LONG <= position < LONG + 16:
                lengths[first if position < LONG else second].append(n_drafted)
    assert mean(lengths["code"]) > 1.5 * mean(lengths["writing"])
