"""The timed texts of a race, and the state of each text at any time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from ggufspec.decoding.tree import n_equal

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.scoring import Divergence

PLAIN, SPECULATIVE, N_GRAMS = "plain", "speculative", "n-grams"  # names of lanes


@dataclass(frozen=True)
class TimedText:
    """A piece of text that arrived `seconds` after the end of the prompt."""

    seconds: float
    text: str
    n_tokens: int
    drafted: bool


@dataclass(frozen=True)
class Lane:
    """One contender: its pieces of text in order of time, and its statistics."""

    name: str
    pieces: tuple[TimedText, ...]
    tokens: tuple[int, ...]
    finish_reason: str | None
    stats: Stats

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def seconds(self) -> float:
        return self.pieces[-1].seconds if self.pieces else 0.0


@dataclass(frozen=True)
class Race:
    """Both contenders on the same prompt. They ran one after the other, `plain` first."""

    prompt: str
    plain: Lane
    speculative: Lane
    temperature: float
    divergence: Divergence | None = None  # at temperature 0; None if the texts are equal

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.plain, self.speculative

    @property
    def seconds(self) -> float:
        return max(lane.seconds for lane in self.lanes)

    @property
    def speedup(self) -> float | None:
        """Speed-up over plain decoding; None if a speed is unknown."""
        before = self.plain.stats.tokens_per_second
        after = self.speculative.stats.tokens_per_second
        return after / before if before > 0 and after > 0 else None

    @property
    def first_difference(self) -> int | None:
        """The index of the first token that differs; None if the texts are equal."""
        first, second = self.plain.tokens, self.speculative.tokens
        n = n_equal(first, second)
        return None if n == len(first) == len(second) else n


@dataclass(frozen=True)
class LaneState:
    n_pieces: int
    n_tokens: int
    share: float  # share of its tokens that have arrived
    tokens_per_second: float | None  # until now, at the end of all; None before the first piece
    finished: bool


def state_at(lane: Lane, seconds: float) -> LaneState:
    """The state of a lane `seconds` after the end of the prompt."""
    n_pieces = bisect_right(lane.pieces, seconds, key=lambda piece: piece.seconds)
    finished = n_pieces == len(lane.pieces)
    counts = [0, *accumulate(piece.n_tokens for piece in lane.pieces)]
    n_tokens = counts[n_pieces]
    rate: float | None = None
    if finished:
        rate = lane.stats.tokens_per_second
    elif n_tokens and (until := lane.pieces[n_pieces - 1].seconds) > 0:
        rate = n_tokens / until
    return LaneState(n_pieces, n_tokens, n_tokens / (counts[-1] or 1), rate, finished)


def verdict(race: Race) -> str:
    at = race.first_difference
    if race.temperature > 0:
        if at is None and not race.speculative.stats.n_drafted:
            return "The two texts are the same: nothing was drafted, and both have the same seed."
        if at is None:
            return "The two texts are the same by chance: each was sampled independently."
        return (
            "The two texts differ because each was sampled independently; both are drawn from the "
            "same distribution, the target's own."
        )
    if at is None:
        return f"The two texts are the same, all {len(race.plain.tokens)} tokens."
    assert race.divergence is not None
    return f"The two texts differ {race.divergence.reason}."
