"""Measures the seconds of whole passes, in contexts made for that or in those of a pair."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from math import inf
from time import perf_counter
from typing import TypeVar

from ggufspec.common import defaults
from ggufspec.common.progress import Progress, Share
from ggufspec.decoding.types import Logits
from ggufspec.errors import DecodeError, OptionError
from ggufspec.llama import state
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.log import listening
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.threadpool import ThreadPools
from ggufspec.llama.vocab_map import filler_tokens
from ggufspec.measure import table
from ggufspec.measure.disturbed import Watch
from ggufspec.measure.table import Row, Table

Kind = TypeVar("Kind")

SIZES = (1, 2, 4, 8)  # tokens of the passes that decide
PIECE = 64  # tokens of a pass over a piece of a prompt; larger pieces cost as much per token
_DEEP = 1024  # tokens before a pass, from which on passes are repeated least
_N_TRIED = 2
_MOST_ROUNDS, _FEWEST_ROUNDS, _FEWEST_DEEP = 9, 3, 2

_N_COPIED = 32  # tokens that are read into a context; its further cells are copies of theirs
_MOST_REPEATS = 10  # times n_repeats, for short passes
HOPELESS = 2.0  # times the best number of threads; slower numbers are not tried further


class Probe:
    """A context of its own, in which passes of a model are timed. Close it before the model."""

    def __init__(
        self,
        model: Model,
        n_most: int,
        deepest: int = 0,
        pools: ThreadPools | None = None,
        attention: str = defaults.FLASH_ATTENTION,
    ) -> None:
        """For passes over at most `n_most` tokens, after at most `deepest`; `pools`: see Context.

        Raises OutOfMemoryError, and ModelError for a model without passes.
        """
        n_batch, n_sequences = max(n_most, _N_COPIED if deepest else 1), 2 if deepest else 1
        options = ContextOptions(
            n_ctx=-(-(deepest + n_batch) // n_sequences),
            n_rows=min(n_most, max(SIZES)),
            n_sequences=n_sequences,
            n_batch=n_batch,
            flash_attention=attention,
            is_unified=True,
        )
        self.context = Context(model, options, pools=pools)
        self._tokens = filler_tokens(model.vocab, n_batch)
        self._n_read = self._n_held = 0

    def seconds(self, n_tokens: int, n_rows: int) -> float | None:
        """Seconds of a pass with logits of its last `n_rows`; None if it fails.

        Raises KeyboardInterrupt within the pass.
        """
        self.context.truncate(self._n_read)
        began = perf_counter()
        try:
            self.context.decode(self._tokens[:n_tokens], min(n_rows, n_tokens))
        except DecodeError:
            return None
        return perf_counter() - began

    def fill(self, n_tokens: int) -> bool:
        """Let passes follow `n_tokens`, a multiple of 32, no fewer than before; False: it fails."""
        if n_tokens and not self._n_read:
            if self.seconds(_N_COPIED, 1) is None:
                return False
            self._n_read = self._n_held = _N_COPIED
        self.context.truncate(self._n_read)
        if self._n_held >= n_tokens:
            return True
        n_times, self._n_held = n_tokens // self._n_held - 1, n_tokens
        with listening():
            return state.repeat(self.context.pointer, n_times)

    def close(self) -> None:
        self.context.close()


def time_rows(
    kinds: Iterable[tuple[Model, str]],
    passes: Iterable[tuple[int, int]],
    watch: Watch,
    *,
    at_least: float,
    most: Mapping[tuple[int, int], float] | None = None,
    report: Share = lambda share: None,
) -> Table:
    """Times of passes of models, each with a way of attention: see `measure`.

    Fewer if a pass is too slow, none if one fails. Raises Disturbed.
    """
    wanted, pools = [*passes], ThreadPools()
    n_most, deepest = (max(each) for each in zip(*wanted, strict=True))

    def tell(share: float) -> None:
        report(share)
        watch.check()

    with ExitStack() as stack:
        probes = {
            (" ".join(model.kernels.types), table.way(attention)): stack.enter_context(
                closing(Probe(model, n_most, deepest, pools, attention))
            )
            for model, attention in kinds
        }
        found = measure(probes, wanted, at_least=at_least, most=most, tell=tell) or {}
    for times in found.values():
        watch.end(times)
    return {Row(*kind, *at): times[at] for kind, times in found.items() for at in times}


def measure(
    contexts: Mapping[Kind, Probe],
    passes: Iterable[tuple[int, int]],
    *,
    at_least: float,
    most: Mapping[tuple[int, int], float] | None = None,
    tell: Callable[[float], object] = lambda share: None,
) -> dict[Kind, dict[tuple[int, int], float]] | None:
    """The least seconds of passes over (tokens, depth), by context; None: a pass fails.

    Contexts and sizes take turns, so that slow moments of the machine slow all of them down. Passes
    are repeated for `at_least` seconds, those over pieces of prompts not at all. A pass that twice
    takes longer than its time in `most` ends the measurement. `tell` is called after each pass,
    with the share that is done. Raises KeyboardInterrupt within a pass.
    """
    found: dict[Kind, dict[tuple[int, int], float]] = {kind: {} for kind in contexts}
    wanted = sorted(passes, key=lambda each: (each[1], each[0]))
    depths = sorted({depth for _, depth in wanted})
    for i, depth in enumerate(depths):
        if not all(context.fill(depth) for context in contexts.values()):
            return None
        n_rounds, began = _FEWEST_DEEP if depth >= _DEEP else _FEWEST_ROUNDS, perf_counter()
        for j in range(_MOST_ROUNDS):
            if j >= n_rounds and perf_counter() - began > at_least / len(depths):
                break
            sizes = [n for n, at in wanted if at == depth and (n < PIECE or not j)]
            for size, (kind, context) in product(sizes, contexts.items()):
                at, n_rows = (size, depth), min(size, max(SIZES))
                limit = (most or {}).get(at, inf)
                for _ in range(_N_TRIED):  # the first may read weights from the disk
                    if (seconds := context.seconds(size, n_rows)) is None:
                        return None
                    found[kind][at] = min(seconds, found[kind].get(at, inf))
                    if found[kind][at] <= limit:
                        break
                tell((i + min((j + 1) / n_rounds, 1.0)) / len(depths))
                if found[kind][at] > limit:
                    return found
    return found


class FilledContext:
    """A context that holds a text, for passes over the tokens after it.

    All passes start from the same cells: a pass of `n` tokens evaluates the last token of the text
    and `n - 1` more, with logits after each.
    """

    def __init__(
        self,
        context: Context,
        *,
        depth: int,
        n_most: int,
        progress: Progress | None = None,
        sequence: int = 0,
    ) -> None:
        """`depth`: tokens before a pass over at most `n_most`; fewer if the context is small.

        Raises OptionError if not even `n_most` tokens fit, DecodeError, ClosedError.
        """
        if not 1 <= n_most <= context.n_ctx:
            raise OptionError(
                f"a context of {context.n_ctx:,} tokens has no room for batches of {n_most:,}; "
                "measure smaller batches, or use a larger context (n_ctx, -c)"
            )
        self.context = context
        self.depth = max(min(depth, context.n_ctx - n_most), 0)
        tokens = filler_tokens(context.model.vocab, self.depth + n_most)
        self._text, self._ahead = array("i", tokens[: self.depth + 1]), tokens[self.depth + 1 :]
        # drafts=True: every pass is undone, so models that cannot drop a tail save a checkpoint.
        self._session = LlamaSession(context, sequence, drafts=True)
        self._session.feed(self._text[:-1], progress)
        self._session.score(self._text)

    def score(self, n_tokens: int) -> Logits:
        """Run a pass over `n_tokens`; returns its logits."""
        return self._session.score(self._text, self._ahead[: n_tokens - 1])


def time_target(
    context: Context,
    sizes: Sequence[int],
    *,
    depth: int,
    n_repeats: int,
    at_least: float = 0.0,
    progress: Progress | None = None,
    sequence: int = 0,
) -> dict[int, list[float]]:
    """Seconds of target passes over each number of tokens, with logits for all of them.

    Raises OptionError if the context is smaller than the largest size, DecodeError, ClosedError.
    """
    filled = FilledContext(context, depth=depth, n_most=max(sizes), sequence=sequence)
    passes = {size: partial(filled.score, size) for size in sizes}
    return time_interleaved(passes, n_repeats, at_least=at_least, progress=progress)


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

    `candidates`: rows of numbers to try, each with the likeliest first. A row ends at a number that
    is HOPELESS times slower than the best. Afterwards the context has its threads as before.
    """
    n_before = context.n_threads
    filled = FilledContext(context, depth=depth, n_most=max(sizes))
    try:
        found: dict[int, dict[int, list[float]]] = {}
        for row in candidates:
            for n_threads in row:
                if n_threads in found:
                    continue
                first = time_interleaved(_by_threads(filled, [n_threads], sizes), 1)
                found[n_threads] = {size: first[n_threads, size] for size in sizes}
                if n_threads in _slow(found):
                    break
        slow = _slow(found)
        left = [n_threads for n_threads in found if n_threads not in slow]
        again = time_interleaved(
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
    """Seconds in which an empty context reads `n_tokens`. Raises DecodeError, ClosedError."""
    text = filler_tokens(context.model.vocab, n_tokens)
    session = LlamaSession(context)
    found = []
    for i in range(n_repeats):
        session.forget()
        found.append(_seconds(partial(session.feed, text)))
        if progress is not None:
            progress(i + 1, n_repeats)
    return found


def time_interleaved(
    passes: Mapping[Kind, Callable[[], object]],
    n_repeats: int,
    *,
    at_least: float = 0.0,
    progress: Progress | None = None,
) -> dict[Kind, list[float]]:
    """Seconds of each kind of pass, `n_repeats` times, in alternating order.

    Repeats more often if that takes less than `at_least` seconds, because short passes are easily
    disturbed. Each pass runs twice and is timed the second time: the first run finds caches,
    threads and graphs as the previous kind left them.
    """
    found: dict[Kind, list[float]] = {kind: [] for kind in passes}
    n_all = n_repeats * len(passes)
    order = list(passes)
    if progress is not None:
        progress(0, n_all)
    started = perf_counter()
    for i in range(_MOST_REPEATS * n_repeats):
        if i >= n_repeats and perf_counter() - started > at_least:
            break
        for j, kind in enumerate(order):
            passes[kind]()
            found[kind].append(_seconds(passes[kind]))
            if progress is not None:
                progress(min(i * len(order) + j + 1, n_all), n_all)
        order.reverse()
    return found


def _slow(found: Mapping[int, Mapping[int, list[float]]]) -> set[int]:
    totals = {n_threads: sum(map(sum, times.values())) for n_threads, times in found.items()}
    return {n for n, total in totals.items() if total > HOPELESS * min(totals.values())}


def _by_threads(
    filled: FilledContext, candidates: Sequence[int], sizes: Sequence[int]
) -> dict[tuple[int, int], Callable[[], None]]:
    def score(n_threads: int, size: int) -> None:
        if filled.context.n_threads != n_threads:
            filled.context.use_threads(n_threads)
        filled.score(size)

    return {(n, size): partial(score, n, size) for n in candidates for size in sizes}


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started
