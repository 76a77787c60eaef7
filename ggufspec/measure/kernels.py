"""Loads a model with the kernels that its passes are fastest with, llama.cpp's or ours."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from os import environ
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from ggufspec.common.failures import closed_on_error
from ggufspec.common.progress import Phases, Share
from ggufspec.drafting import profile_store
from ggufspec.errors import OutOfMemoryError
from ggufspec.llama import devices, kernels
from ggufspec.llama.context_options import default_attention
from ggufspec.llama.kernel_offer import Placed, offer
from ggufspec.llama.log import logger
from ggufspec.llama.model import Model
from ggufspec.measure import table
from ggufspec.measure.disturbed import undisturbed
from ggufspec.measure.passes import SIZES, time_rows
from ggufspec.measure.table import Row, Table

# For a model partly on devices, a whole text of this many prompt and answer tokens decides, too:
# packed weights leave the host buffers, from which devices read weights for prompts.
PROMPT, N_WRITTEN = 512, 256
MOST_LOAD_SECONDS = 5.0  # of a load, above which a model is not loaded again to compare kernels

_NO_SLOWER = 1.02  # times llama.cpp's time for one token; repeated measurements differ by this
_CLEARLY_SLOWER = 1.25  # times the same for each byte of weights, with another model of the types
_SECONDS = 1.0  # of repeated passes

Make = Callable[[Collection[str] | None, Share], Model]  # types for our kernels; None: all
Milliseconds = Mapping[int, float]  # by tokens of a pass


class Choice(NamedTuple):
    """The types of a model's weights that our kernels multiply, and why, in one line."""

    types: Sequence[str]
    reason: str


def load(
    make: Make, path: Path, placed: Placed, *, measures: bool, progress: Share | None = None
) -> tuple[Model, str | None]:
    """Load a model with the kernels that are fastest for it: (the model, the reason in one line).

    Its table decides. Without one, passes over SIZES tokens are measured and stored, with the model
    loaded a second time beside the first, for other kernels. That is left out where a load takes
    longer than MOST_LOAD_SECONDS or memory is short: then what was measured of another model with
    the same types of weights decides, or else our kernels are used, as their trial has passed.
    `measures`: False: our kernels are used wherever they work. Raises ModelError, OutOfMemoryError,
    OptionError.
    """
    phases = Phases(progress)
    types = [*offer(path, placed).types]
    if not types or not measures or environ.get(kernels.VARIABLE) == "on":
        return make(None, phases), None
    about = table.key(path, placed)
    known, began = choose(table.recall(about), types, placed), perf_counter()
    choice = known or _by_types(about, types, placed)
    model = make(choice.types if choice else None, phases)
    seconds = perf_counter() - began
    with closed_on_error(model.close):
        why = "it takes long to load" if seconds > MOST_LOAD_SECONDS else None
        why = why if _fits_again(about) else "memory is short"
        if known is None and why is None:
            phases.n = 3
            phases.end()
            with measuring():  # another process may have stored it meanwhile
                if (known := choose(table.recall(about), types, placed)) is None:
                    known = _compare(model, make, path, placed, types, phases)
        elif choice is None:
            choice = Choice(types, f"own kernels for {', '.join(types)}: not compared, since {why}")
        _time_a_token(model, about)
    choice = known or choice
    if choice is None or {*choice.types} == {*model.kernels.types}:
        return model, choice and choice.reason
    model.close()
    return make(choice.types, phases), choice.reason


def recall(path: Path, placed: Placed) -> Choice | None:
    """The choice by what is stored; None if nothing is known of the model and its types."""
    types = [*offer(path, placed).types]
    if not types:
        return Choice((), "llama.cpp's kernels: ggufspec has none for these weights here")
    about = table.key(path, placed)
    return choose(table.recall(about), types, placed) or _by_types(about, types, placed)


def choose(rows: Table, types: Sequence[str], placed: Placed) -> Choice | None:
    """The choice between rows with these types of ours and without; None if rows are missing.

    Ours are used for all types if one token is then no slower, and passes are faster on average.
    Otherwise, for a model on the CPU alone, each type with which that holds on its own.
    """
    theirs, *ours = (_times(rows, each, placed) for each in _ways(types, placed))
    if theirs is None or not ours or ours[0] is None:
        return None
    if _is_faster(ours[0], theirs):
        return Choice(types, _reason(types, ours[0], theirs))
    if any(each is None for each in ours[1:]):
        return None
    singly = zip(types, ours[1:], strict=False)
    faster = {name: each for name, each in singly if each and _is_faster(each, theirs)}
    if not faster:
        return Choice((), _reason((), ours[0], theirs))
    return Choice(
        [*faster], _reason([*faster], min(faster.values(), key=lambda each: each[1]), theirs)
    )


def measuring() -> AbstractContextManager[None]:
    """Within the block, no other process measures: see profile_store."""
    return profile_store.measuring(
        lambda: logger.warning(
            "ggufspec: another process measures a model on this machine; this one waits for it"
        )
    )


def _ways(types: Sequence[str], placed: Placed) -> list[Sequence[str]]:
    """Types for our kernels that are compared: none, all, then each alone."""
    singly = [[name] for name in types] if len(types) > 1 and not placed.devices else []
    return [(), types, *singly]


def _compare(
    model: Model, make: Make, path: Path, placed: Placed, types: Sequence[str], phases: Phases
) -> Choice | None:
    """Measure a model beside the same with other kernels; None if other programs disturb that."""
    about, rows = table.key(path, placed), dict[Row, float]()
    sizes = (*SIZES, PROMPT) if placed.devices else SIZES
    found: Table | None = {}
    if undisturbed(lambda watch: watch, devices.n_threads_default()) is not None:
        logger.warning(
            "ggufspec: %s is loaded with llama.cpp's kernels and with ggufspec's, to measure which "
            "are faster; this happens once",
            path.name,
        )
        for others in _ways(types, placed):
            if {*others} == {*model.kernels.types}:
                continue
            try:
                other = make(others, phases)
            except OutOfMemoryError:  # of a device
                return None
            phases.end()
            with closing(other):
                found = _rows([model, other], sizes, report=phases)
            phases.end()
            rows |= found or {}
            if not found or (choice := choose(rows, types, placed)) is not None:
                break
            phases.n += 2
        if found and choice is not None:
            table.add(about, rows, replaces=True)
            return choice
    logger.warning(
        "ggufspec: other programs use the processor, so kernels are not compared: a later load "
        "measures which are faster"
    )
    return None


def _time_a_token(model: Model, about: Mapping[str, object]) -> None:
    """Store what a pass over one token takes, where that is unknown: see _by_types."""
    types = " ".join(model.kernels.types)
    if Row(types, table.way(default_attention(model)), 1, 0) not in table.recall(about):
        table.add(about, _rows([model], [1], at_least=0.0) or {})


def _rows(
    models: Sequence[Model],
    sizes: Sequence[int],
    *,
    at_least: float = _SECONDS,
    report: Share = lambda share: None,
) -> Table | None:
    """Passes of models that differ in their kernels, on empty caches; empty if they have none.

    None: other programs disturb them.
    """
    kinds = [(model, default_attention(*models)) for model in models]
    passes = [(n, 0) for n in sizes]
    return undisturbed(
        lambda watch: time_rows(kinds, passes, watch, at_least=at_least, report=report),
        devices.n_threads_default(),
    )


def _by_types(about: Mapping[str, object], types: Sequence[str], placed: Placed) -> Choice | None:
    """The choice for another model of the same types, unless passes with ours have refuted it."""
    name, n_bytes = " ".join(types), about["n_bytes"]
    assert isinstance(n_bytes, int)
    known = table.recall(about)
    one = next((known[row] for row in known if (row.types, *row[2:]) == (name, 1, 0)), 0.0)
    for rows, n_bytes_other in table.of_same_types(about):
        choice = choose(rows, types, placed)
        theirs = _times(rows, (), placed)
        if choice is None or theirs is None:
            continue
        names = ", ".join(choice.types)
        whose = f"own kernels for {names}" if names else "llama.cpp's kernels"
        reason = f"{whose}: they were faster with another model of the same types of weights"
        expected = theirs[1] / 1000 * n_bytes / n_bytes_other
        if choice.types and one > _CLEARLY_SLOWER * expected:
            return Choice(
                (), "llama.cpp's kernels: passes with ggufspec's were slower than expected"
            )
        return Choice(choice.types, reason)
    return None


def _fits_again(about: Mapping[str, object]) -> bool:
    free, n_bytes = devices.free_memory(), about["n_bytes"]
    return free is None or (isinstance(n_bytes, int) and n_bytes < free)


def _times(rows: Table, types: Sequence[str], placed: Placed) -> Milliseconds | None:
    sizes, name = (*SIZES, PROMPT) if placed.devices else SIZES, " ".join(types)
    found = {
        row.n_tokens: 1000 * seconds
        for row, seconds in rows.items()
        if (row.types, row.depth) == (name, 0)
    }
    return {n: found[n] for n in sizes} if found.keys() >= {*sizes} else None


def _is_faster(times: Milliseconds, than: Milliseconds) -> bool:
    if times[1] > _NO_SLOWER * than[1]:
        return False
    of_text, of_text_than = (each.get(PROMPT, 0.0) + N_WRITTEN * each[1] for each in (times, than))
    ratios = (times[size] / than[size] for size in SIZES)
    return sum(ratios) < len(SIZES) and of_text <= _NO_SLOWER * of_text_than


def _reason(types: Sequence[str], ours: Milliseconds, theirs: Milliseconds) -> str:
    of_ours, of_theirs = (
        "/".join(f"{each:.3g}" for each in times.values()) for times in (ours, theirs)
    )
    passes = f"passes over {'/'.join(map(str, theirs))} tokens take"
    if not types:
        return f"llama.cpp's kernels: {passes} {of_theirs} ms, with ggufspec's {of_ours}"
    return (
        f"own kernels for {', '.join(types)}: {passes} {of_ours} ms, with llama.cpp's {of_theirs}"
    )
