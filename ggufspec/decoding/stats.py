"""Statistics of a generation: acceptance, mean length, tokens per second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ggufspec.decoding.types import Round

COUNTS = ("n_prompt", "n_generated", "n_rounds", "n_drafted", "n_accepted")  # of Stats

# Seconds in llama_decode: by "target" or "draft", then by the number of threads.
Threads = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Seconds:
    """Where the time of a generation went; the other fields do not include `prompt`.

    If passes are shared with other texts, `target` has this text's share and `other` the rest.
    `decode` is the part of `draft + target` inside llama_decode.
    """

    prompt: float
    draft: float
    target: float
    verify: float
    other: float
    decode: float

    @property
    def generation(self) -> float:
        return self.draft + self.target + self.verify + self.other

    @property
    def own(self) -> float:
        """Time spent on this text alone, without other texts generated at the same time."""
        return self.draft + self.target + self.verify


@dataclass(frozen=True)
class Stats:
    """What a generation did. Counts are of tokens, except `n_rounds`.

    `drafted_by_position[i]`: number of drafts whose longest branch has more than i tokens. Without
    trees, its sum is `n_drafted`; in trees, `n_drafted` also counts the nodes beside that branch.
    `accepted_by_position[i]`: number of rounds that accepted more than i tokens.
    """

    n_prompt: int
    n_prompt_reused: int  # prompt tokens that were already in the target's KV cache
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    n_expected: float | None  # accepted tokens as predicted before verification; None: unknown
    n_rounds_without_draft: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    seconds: Seconds
    threads: Threads
    notes: Mapping[str, float]  # reported by the drafter, such as n_forced

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time, without prompt processing."""
        return _ratio(self.n_generated, self.seconds.generation)

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were accepted; 0 if nothing was drafted."""
        return _ratio(self.n_accepted, self.n_drafted)

    @property
    def mean_length(self) -> float:
        """Generated tokens per round, that is per pass of the target."""
        return _ratio(self.n_generated, self.n_rounds)

    @property
    def mean_depth(self) -> float:
        """Average length of a draft's longest branch; 0 if nothing was drafted."""
        return _ratio(sum(self.drafted_by_position), max(self.drafted_by_position, default=0))

    @property
    def overhead(self) -> float:
        """The share of the generation's wall time that was spent outside llama_decode."""
        return 1 - _ratio(self.seconds.decode, self.seconds.generation) if self.n_rounds else 0.0


def summarize(
    rounds: Sequence[Round],
    *,
    n_prompt: int,
    n_prompt_reused: int = 0,
    n_generated: int = 0,
    prompt_seconds: float = 0.0,
    generation_seconds: float = 0.0,
    threads: Threads | None = None,
    notes: Mapping[str, float] | None = None,
) -> Stats:
    draft = sum(round_.draft_seconds for round_ in rounds)
    target = sum(round_.target_seconds / round_.n_sharers for round_ in rounds)
    verify = sum(round_.verify_seconds for round_ in rounds)
    expected = [round_.expected for round_ in rounds if round_.expected is not None]
    depths = [round_.depth for round_ in rounds]
    n_positions = max(depths, default=0)
    return Stats(
        n_prompt=n_prompt,
        n_prompt_reused=n_prompt_reused,
        n_generated=n_generated,
        n_rounds=len(rounds),
        n_drafted=sum(round_.n_drafted for round_ in rounds),
        n_accepted=sum(round_.n_accepted for round_ in rounds),
        n_expected=sum(expected) if expected else None,
        n_rounds_without_draft=sum(not round_.n_drafted for round_ in rounds),
        drafted_by_position=_reach(depths, n_positions),
        accepted_by_position=_reach((round_.n_accepted for round_ in rounds), n_positions),
        seconds=Seconds(
            prompt=prompt_seconds,
            draft=draft,
            target=target,
            verify=verify,
            other=max(generation_seconds - draft - target - verify, 0.0),
            decode=sum(sum(of_all.values()) for of_all in (threads or {}).values()),
        ),
        threads=threads or {},
        notes=notes or {},
    )


def threads_since(before: Threads, now: Threads) -> Threads:
    """What was added to the seconds by threads."""
    return {
        name: {
            n: seconds - before.get(name, {}).get(n, 0.0)
            for n, seconds in of_all.items()
            if seconds > before.get(name, {}).get(n, 0.0)
        }
        for name, of_all in now.items()
    }


def _reach(lengths: Iterable[int], n_positions: int) -> tuple[int, ...]:
    known = list(lengths)
    return tuple(sum(length > i for length in known) for i in range(n_positions))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
