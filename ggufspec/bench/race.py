"""A race that was run, and how it stands at any time of its replay.

Knows who wrote what, and when; no clock, no models, no pictures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ggufspec.decoding.stats import Stats

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True)
class Piece:
    """What one author wrote at once. `seconds` are from the end of the prompt to its coming."""

    seconds: float
    text: str
    n_tokens: int
    drafted: bool


@dataclass(frozen=True)
class Lane:
    """One contender: its pieces in the order of time, and what became of them."""

    name: str
    pieces: tuple[Piece, ...]
    tokens: tuple[int, ...]
    finish_reason: str | None
    stats: Stats

    @property
    def text(self) -> str:
        """All that it wrote."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def seconds(self) -> float:
        """When it had finished."""
        return self.pieces[-1].seconds if self.pieces else 0.0


@dataclass(frozen=True)
class Race:
    """Both contenders on the same prompt. They ran one after the other, `plain` first."""

    prompt: str
    plain: Lane
    speculative: Lane
    temperature: float

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.plain, self.speculative

    @property
    def seconds(self) -> float:
        """When the slower one had finished."""
        return max(lane.seconds for lane in self.lanes)

    @property
    def speedup(self) -> float | None:
        """How many times as fast the speculative one was; None where a speed is unknown."""
        before = self.plain.stats.tokens_per_second
        after = self.speculative.stats.tokens_per_second
        return after / before if before > 0 and after > 0 else None

    @property
    def parting(self) -> int | None:
        """The first token, counted from 0, at which the texts differ; None: they are the same."""
        return parting(self.plain.tokens, self.speculative.tokens)


@dataclass(frozen=True)
class Standing:
    """A lane at one time: how much of it is there."""

    n_pieces: int
    n_tokens: int
    share: float  # of its own tokens
    tokens_per_second: float | None  # so far; None before the first piece
    finished: bool


def standing(lane: Lane, seconds: float) -> Standing:
    """How a lane stands so many seconds after the prompt was read; nothing comes before its time.

    One that has finished keeps the speed that it had.
    """
    n_pieces = bisect_right(lane.pieces, seconds, key=lambda piece: piece.seconds)
    finished = n_pieces == len(lane.pieces)
    counts = [0, *accumulate(piece.n_tokens for piece in lane.pieces)]
    n_tokens = counts[n_pieces]
    rate: float | None = None
    if finished:
        rate = lane.stats.tokens_per_second
    elif n_tokens and (until := lane.pieces[n_pieces - 1].seconds) > 0:
        rate = n_tokens / until
    return Standing(n_pieces, n_tokens, n_tokens / (counts[-1] or 1), rate, finished)


def times(race: Race, each: float) -> list[float]:
    """When there is something new to see: every `each` seconds, from the start to the end.

    The last is the end itself, so that nothing is missing then.
    """
    n_steps = int(race.seconds / each)
    found = [step * each for step in range(n_steps + 1)]
    return found if found[-1] == race.seconds else [*found, race.seconds]


def parting(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Where two sequences part; None if they never do."""
    if list(first) == list(second):
        return None
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def verdict(race: Race) -> str:
    """A sentence on the two texts: whether they are the same, and why not."""
    at = race.parting
    if race.temperature > 0:
        if at is None:
            return "The two texts are the same, by chance: each was drawn by itself."
        return (
            "The two texts differ, as two draws do: both are drawn from the same distribution, "
            "the target's own."
        )
    if at is None:
        return f"The two texts are the same, all {len(race.plain.tokens)} tokens."
    return (
        f"The two texts part at token {at + 1}: passes over several tokens round differently from "
        "passes over one, and there two tokens were nearly as likely."
    )
