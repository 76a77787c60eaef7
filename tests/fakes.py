"""A session without a model: logits from a function of the prefix, as strict as llama.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from ggufspec.decoding import verify
from ggufspec.decoding.loop import speculate
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.tree import path_to
from ggufspec.decoding.types import Ask, Logits, Round, Scored, Session
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.strategies import Materials, make

GREEDY = Sampling(temperature=0)


class FakeSession:
    """Scores by `logits_after(prefix)`; counts its calls, and spoils old rows as llama.cpp does."""

    def __init__(
        self, logits_after: Callable[[tuple[int, ...]], np.ndarray], n_ctx: int = 10_000
    ) -> None:
        self._logits_after = logits_after
        self._n_ctx = n_ctx
        self._buffer: Logits | None = None
        self.n_scores = 0
        self.n_rows = 0

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        assert tokens, "an empty batch"
        assert len(tokens) + len(draft) <= self._n_ctx, "no cell left"
        if self._buffer is not None:
            self._buffer.fill(np.nan)  # rows are valid until the next score
        parents = parents or range(-1, len(draft) - 1)
        paths = [path_to(parents, node) for node in range(-1, len(draft))]
        prefixes = [(*tokens, *(draft[node] for node in path)) for path in paths]
        self._buffer = np.array([self._logits_after(prefix) for prefix in prefixes], np.float32)
        self.n_scores += 1
        self.n_rows += len(prefixes)
        return self._buffer


def drafter_of(
    name: str,
    session: Session | None,
    *,
    sampling: Sampling = GREEDY,
    stop_tokens: Sequence[int] = (),
    n_draft: int = 8,
    **more: Any,
) -> Any:
    """A strategy with the materials that an engine gives it."""
    uniforms = more.pop("uniforms", None) or uniform_streams(4)[1]
    given = Materials(sampling, uniforms, stop_tokens, session, n_draft_max=n_draft)
    return make(name, replace(given, **more))


def speculated(
    tokens: MutableSequence[int], *, target: Session, n_tokens: int = 60, **loop: Any
) -> Iterator[Round]:
    """The rounds of a loop that has its target to itself."""
    loop.setdefault("n_end", len(tokens) + n_tokens)
    if "uniforms" not in loop:
        loop["uniforms"] = uniform_streams(4)[0]
    usual = {"verify": verify.rule("traversal"), "sampling": GREEDY, "n_draft": 8}
    steps = speculate(tokens, **{**usual, **loop})
    for step in steps:
        assert isinstance(step, Ask)
        start = perf_counter()
        logits = target.score(*step[:3])
        turn = steps.send(Scored(logits, perf_counter() - start))
        assert isinstance(turn, Round)
        yield turn


def known_costs(
    curve: Sequence[float],
    step: float,
    n_per_step: int = 1,
    n_most: int | None = None,
    plain: float = 0.0,
    read: float = 0.0,
) -> CostModel:
    """Frozen costs: passes over 1, 2 ... tokens, and draft steps; see CostModel.restore."""
    costs = CostModel(n_most or len(curve), n_per_step=n_per_step)
    costs.restore(dict(enumerate(curve, 1)), plain, step, read)
    costs.is_frozen = True
    return costs


def of_last_two(logits_after: Callable[[tuple[int, ...]], np.ndarray]) -> Callable[..., np.ndarray]:
    """The same function of the last two tokens of a prefix, which computes each row once."""

    @functools.cache
    def row(last: tuple[int, ...]) -> np.ndarray:
        found = logits_after(last)
        found.setflags(write=False)
        return found

    return lambda prefix: row(tuple(prefix[-2:]))


def hashed_logits(n_vocab: int, seed: int, spread: float = 2.0) -> Callable[..., np.ndarray]:
    """A fixed random function of the last two tokens of a prefix."""
    return of_last_two(lambda last: np.random.default_rng([seed, *last]).normal(0, spread, n_vocab))


def scripted_logits(script: Sequence[int], n_vocab: int) -> Callable[..., np.ndarray]:
    """After a prefix of n tokens comes script[n]."""

    def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
        row: np.ndarray = np.eye(n_vocab)[script[len(prefix) % len(script)]]
        return row * 20

    return logits_after
