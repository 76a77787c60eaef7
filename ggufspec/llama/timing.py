"""How long passes take: decodes text that nobody will read, and looks at the clock.

Passes of different kinds take turns, so that a machine that grows slower or faster misleads nobody.
Judges nothing: seconds come out as they were.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple, TypeVar

from ggufspec.drafting.cost_model import CostModel
from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab import Vocab

Progress = Callable[[int, int], None]  # done, of: measurements, or tokens that are read before
What = TypeVar("What")

# A model of experts reads of all of them where tokens are arbitrary: they are of a text.
_TEXT = """\
In the year of the great frost the river stood still from one bridge to the other, and people who \
had never met each other walked across it with lanterns. A baker sold warm bread from a sledge; \
two boys had built a tower out of ice (it was 12 feet high, they said, or nearly), and an old \
captain, who trusted no water that he could not hear, watched them from the quay. "It will not \
hold," he told everybody. "Nothing holds that begins so suddenly." But it held until March.
"""
_N_READ = 16
_SHORT = 32  # tokens in the cache, for a short look
_MOST_REPEATS = 10  # times as often as asked, for passes that are soon over
_HOPELESS = 2.0  # times as slow as the best so far: more of the same is not tried


class DraftTimes(NamedTuple):
    """Seconds of a draft step each, and of reading `n_read` tokens in one batch each."""

    steps: list[float]
    readings: list[float]
    n_read: int


class Filled:
    """A context whose cells are filled with a text, so that a pass over what follows can be timed.

    Passes start from the same cells again and again: a pass of `n` tokens evaluates the last of the
    text and `n - 1` more, and gives logits after each.
    """

    def __init__(
        self, context: Context, *, depth: int, n_most: int, progress: Progress | None = None
    ) -> None:
        """`depth`: tokens before a pass over at most `n_most`; fewer where the context is small.

        Raises OptionError where not even `n_most` tokens fit, DecodeError, ClosedError.
        """
        if not 1 <= n_most <= context.n_ctx:
            raise OptionError(
                f"a context of {context.n_ctx:,} tokens has no room for batches of {n_most:,}; "
                "measure smaller batches, or take a larger context (n_ctx, -c)"
            )
        self.context = context
        self.depth = max(min(depth, context.n_ctx - n_most), 0)
        tokens = filler(context.model.vocab, self.depth + n_most)
        self._text, self._ahead = array("i", tokens[: self.depth + 1]), tokens[self.depth + 1 :]
        # Every pass is taken back: a model that cannot drop its tail saves its state before one.
        self._session = LlamaSession(context, drafts=True)
        self._session.feed(self._text[:-1], progress)
        self._session.score(self._text)

    def score(self, n_tokens: int) -> None:
        """A pass over that many tokens."""
        self._session.score(self._text, self._ahead[: n_tokens - 1])

    def read(self, n_tokens: int) -> None:
        """A batch of that many tokens without logits, behind the text."""
        self._session.feed([*self._text, *self._ahead[:n_tokens]])


def time_target(
    context: Context,
    sizes: Sequence[int],
    *,
    depth: int,
    n_repeats: int,
    at_least: float = 0.0,
    progress: Progress | None = None,
) -> dict[int, list[float]]:
    """Seconds of target passes over each number of tokens, with logits for all of them.

    Raises OptionError where the context is smaller than the largest size, DecodeError, ClosedError.
    """
    filled = Filled(context, depth=depth, n_most=max(sizes))
    passes = {size: _call(filled.score, size) for size in sizes}
    return time_in_turns(passes, n_repeats, at_least=at_least, progress=progress)


def time_draft(
    context: Context,
    *,
    depth: int,
    n_repeats: int,
    at_least: float = 0.0,
    progress: Progress | None = None,
) -> DraftTimes:
    """Seconds of one draft step (a token, a row of logits), and of reading in one batch.

    Raises DecodeError, ClosedError.
    """
    n_read = min(_N_READ, context.n_ctx - 1, context.n_batch)
    filled = Filled(context, depth=depth, n_most=n_read + 1)
    passes = {1: _call(filled.score, 1)}
    steps = time_in_turns(passes, n_repeats, at_least=at_least, progress=progress)[1]
    readings = []
    for _ in range(n_repeats if n_read else 0):
        filled.score(1)  # forgets what was read
        readings.append(_seconds(_call(filled.read, n_read)))
    return DraftTimes(steps, readings, n_read)


def measured(
    target: Context,
    draft: Context | None,
    sizes: Sequence[int],
    progress: Progress | None = None,
    *,
    n_most: int,
    n_sharers: int,
) -> CostModel:
    """The cost model of a pair, from a few passes over each of `sizes` tokens.

    n_most, n_sharers: see CostModel; larger passes than those measured are extrapolated.
    Raises OptionError where the context is smaller than the largest size, DecodeError, ClosedError.
    """
    costs = CostModel(n_most, n_sharers)
    found = time_target(target, sizes, depth=_SHORT, n_repeats=2, progress=progress)
    for size, seconds in found.items():
        costs.observe_target(size, min(seconds))
    if draft is not None:
        times = time_draft(draft, depth=_SHORT, n_repeats=2)
        costs.observe_draft(1, min(times.steps))
        if times.readings:
            costs.observe_reading(times.n_read, min(times.readings))
    return costs


def time_threads(
    context: Context,
    candidates: Iterable[Sequence[int]],
    sizes: Sequence[int],
    *,
    depth: int,
    n_repeats: int,
    at_least: float = 0.0,
    progress: Progress | None = None,
) -> dict[int, dict[int, list[float]]]:
    """Seconds of passes over each size by numbers of threads: {n_threads: {size: [seconds]}}.

    `candidates`: rows of numbers to try, each from the likeliest to the least likely. A row is left
    where it has become hopeless. The context then has as many threads as before.
    """
    n_before = context.n_threads
    filled = Filled(context, depth=depth, n_most=max(sizes))
    try:
        found: dict[int, dict[int, list[float]]] = {}
        for row in candidates:
            for n_threads in row:
                if n_threads in found:
                    continue
                first = time_in_turns(_by_threads(filled, [n_threads], sizes), 1)
                found[n_threads] = {size: first[n_threads, size] for size in sizes}
                if n_threads in _hopeless(found):
                    break
        hopeless = _hopeless(found)
        left = [n_threads for n_threads in found if n_threads not in hopeless]
        again = time_in_turns(
            _by_threads(filled, left, sizes), n_repeats - 1, at_least=at_least, progress=progress
        )
        for (n_threads, size), times in again.items():
            found[n_threads][size] += times
        return found
    finally:
        context.use_threads(n_before)


def time_reading(
    context: Context, n_tokens: int, n_repeats: int, progress: Progress | None = None
) -> list[float]:
    """Seconds in which a context reads so many tokens of a prompt, as it reads all prompts.

    It holds nothing before each. Raises DecodeError, ClosedError.
    """
    text = filler(context.model.vocab, n_tokens)
    session = LlamaSession(context)
    found = []
    for i in range(n_repeats):
        session.forget()
        started = perf_counter()
        session.feed(text)
        found.append(perf_counter() - started)
        if progress is not None:
            progress(i + 1, n_repeats)
    return found


def time_in_turns(
    passes: Mapping[What, Callable[[], None]],
    n_repeats: int,
    *,
    at_least: float = 0.0,
    progress: Progress | None = None,
) -> dict[What, list[float]]:
    """Seconds of each kind of pass, `n_repeats` times, to and fro.

    More often where that takes less than `at_least` seconds: short passes are easily disturbed.
    Each is made twice and timed once: the first of a kind after another finds caches, threads and
    graphs as the other has left them.
    """
    found: dict[What, list[float]] = {what: [] for what in passes}
    n_all = n_repeats * len(passes)
    order = list(passes)
    started = perf_counter()
    for i in range(_MOST_REPEATS * n_repeats):
        if i >= n_repeats and perf_counter() - started > at_least:
            break
        for j, what in enumerate(order):
            passes[what]()
            found[what].append(_seconds(passes[what]))
            if progress is not None:
                progress(min(i * len(order) + j + 1, n_all), n_all)
        order.reverse()
    return found


def filler(vocab: Vocab, n_tokens: int) -> list[int]:
    """So many tokens of a text; of a vocabulary that cannot write it, whatever it has."""
    tokens = vocab.tokenize(_TEXT, add_special=False, parse_special=False)
    tokens = [token for token in tokens if 0 <= token < vocab.n_tokens]
    tokens = [token for token in tokens if token not in vocab.stop_tokens]
    if len(set(tokens)) < 2:
        tokens = [token for token in range(vocab.n_tokens) if token not in vocab.stop_tokens]
    tokens = tokens or list(range(vocab.n_tokens))
    return [tokens[i % len(tokens)] for i in range(n_tokens)]


def _hopeless(found: Mapping[int, Mapping[int, list[float]]]) -> set[int]:
    totals = {n_threads: sum(map(sum, times.values())) for n_threads, times in found.items()}
    return {n for n, total in totals.items() if total > _HOPELESS * min(totals.values())}


def _by_threads(
    filled: Filled, candidates: Sequence[int], sizes: Sequence[int]
) -> dict[tuple[int, int], Callable[[], None]]:
    def score(n_threads: int, size: int) -> Callable[[], None]:
        def call() -> None:
            if filled.context.n_threads != n_threads:
                filled.context.use_threads(n_threads)
            filled.score(size)

        return call

    return {(n, size): score(n, size) for n in candidates for size in sizes}


def _call(pass_over: Callable[[int], None], n_tokens: int) -> Callable[[], None]:
    return lambda: pass_over(n_tokens)


def _seconds(call: Callable[[], None]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started
