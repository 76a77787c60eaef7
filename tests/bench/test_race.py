"""Races: nothing appears too early, and what the two texts show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ggufspec.bench.race import Lane, Race, TimedText, state_at, verdict
from ggufspec.decoding.stats import summarize
from ggufspec.decoding.types import Round
from ggufspec.engine.scoring import Divergence


def lane(name: str, *pieces: tuple[float, str, int, bool]) -> Lane:
    """With token ids that number the tokens."""
    found = tuple(TimedText(*piece) for piece in pieces)
    n_tokens = sum(piece.n_tokens for piece in found)
    rounds = [Round([0] * p.n_tokens, p.n_tokens, p.n_tokens - 1, 0, 0, 0) for p in found]
    stats = summarize(
        rounds,
        n_prompt=1,
        n_prompt_reused=0,
        n_generated=n_tokens,
        prompt_seconds=0,
        generation_seconds=found[-1].seconds if found else 0,
        threads={},
    )
    return Lane(name, found, tuple(range(n_tokens)), "length", stats)


WORDS = "ten quick brown foxes jump over nine lazy dogs then run away".split()  # noqa: SIM905
PLAIN = lane("plain", *((0.5 * i, f" {word}", 1, False) for i, word in enumerate(WORDS, 1)))
FAST = lane(
    "speculative",
    *(
        (0.6 * (i // 3 + 1), "".join(f" {word}" for word in part), len(part), drafted)
        for i in range(0, len(WORDS), 3)
        for part, drafted in ((WORDS[i : i + 2], True), (WORDS[i + 2 : i + 3], False))
        if part
    ),
)
RACE = Race("Once", PLAIN, FAST, 0.0)
EMPTY = Race("Once", lane("plain"), lane("speculative"), 0.0)


def test_no_text_is_shown_before_its_time() -> None:
    assert state_at(PLAIN, 0.0) == (replace(state_at(PLAIN, 0.0), n_pieces=0, n_tokens=0))
    assert state_at(PLAIN, 0.49).tokens_per_second is None
    assert state_at(PLAIN, 0.5).n_tokens == 1
    now = state_at(PLAIN, 3.2)
    assert (now.n_tokens, now.share, now.tokens_per_second) == (6, 0.5, 2.0)
    assert not now.finished


def test_a_finished_lane_keeps_its_speed() -> None:
    for seconds in (FAST.seconds, 100.0):
        now = state_at(FAST, seconds)
        assert now.finished
        assert now.tokens_per_second == FAST.stats.tokens_per_second == pytest.approx(12 / 2.4)


def test_speedup_and_the_end() -> None:
    assert RACE.speedup == pytest.approx(2.5)
    assert RACE.seconds == PLAIN.seconds == 6.0
    assert EMPTY.speedup is None
    assert EMPTY.seconds == 0.0


def test_the_first_differing_token_is_found() -> None:
    def first_difference(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
        lanes = replace(PLAIN, tokens=first), replace(FAST, tokens=second)
        return Race("Once", *lanes, 0.0).first_difference

    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_the_verdict_on_the_texts() -> None:
    assert "the same, all 12 tokens" in verdict(RACE)
    tie = Divergence(2, (2, 99), (0.01, 0.02), rounding=0.03)
    other = replace(RACE, speculative=replace(FAST, tokens=(0, 1, 99)), divergence=tie)
    assert "differ from token 3 on:" in verdict(other)
    assert "0.01 and 0.02 logits apart" in verdict(other)
    assert verdict(other).endswith("by up to 0.03: a near-tie.")
    fault = replace(other, divergence=replace(tie, gaps=(0.04, 0.05)))
    assert verdict(fault).endswith("rounding is not the cause.")
    assert "same distribution" in verdict(replace(other, temperature=0.8))


def test_sampled_texts_without_a_draft_are_not_the_same_by_chance() -> None:
    sampled = replace(RACE, temperature=0.8)
    assert "by chance" in verdict(sampled)
    plain = replace(FAST, stats=replace(FAST.stats, n_drafted=0))
    assert "nothing was drafted" in verdict(replace(sampled, speculative=plain))
