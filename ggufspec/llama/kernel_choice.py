"""Loads a model with the kernels that its own passes are fastest with, llama.cpp's or ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from itertools import pairwise
from os import environ
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import llama_cpp

from ggufspec import _native
from ggufspec.common.progress import Phases
from ggufspec.drafting import profile_store
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import GgufspecError
from ggufspec.llama import devices, kernels
from ggufspec.llama.bare_context import BareContext
from ggufspec.llama.cpu_use import CpuUse, cpu_use, is_busy, were_disturbed
from ggufspec.llama.log import listening, logger
from ggufspec.models.header import Header, read_header
from ggufspec.placement.overrides import Overrides, stays

KERNEL_SIZES = (1, 2, 4, 8)  # tokens of the passes that decide
# For a model partly on devices, a whole text of this many prompt and answer tokens decides, too:
# packed weights leave the host buffers, from which devices read weights for prompts.
PROMPT, N_WRITTEN = 512, 256

# Of a load that measures: loading and timing with either kernels, and what else there may be.
_N_PHASES = 5
_NO_SLOWER = 1.02  # times llama.cpp's time for one token; repeated measurements differ by this
_N_PASSES, _SECONDS = 7, 1.0  # maximum passes per size; limit for repeating them
_N_LEAST = 3  # passes per size, also where they take longer
_DISTURBED = 1.5  # times the pass over more tokens, above which one over fewer was disturbed
_ROOM = 2.5  # times the weights on the host: in the file's form, packed, and for other things
_PROMPT_MILLISECONDS = 1000  # a longer prompt is timed only once

Load = Callable[[bool], "int | None"]  # the argument: whether to leave out host buffers of devices
Milliseconds = Mapping[int, float]  # milliseconds by tokens of a pass


class Choice(NamedTuple):
    """The types of a model's weights that use our kernels, and the times that decided.

    both: weights are also kept in the file's form, which devices read for prompts.
    """

    types: tuple[str, ...] = ()
    llama_cpp: Milliseconds | None = None
    ggufspec: Milliseconds | None = None
    both: bool = False

    @property
    def times(self) -> Milliseconds | None:
        """Milliseconds with the chosen kernels; None if nothing was measured."""
        return self.ggufspec if self.types else self.llama_cpp

    @property
    def reason(self) -> str | None:
        """The choice in one line; None if nothing was measured."""
        if not self.llama_cpp or not self.ggufspec:
            return None
        sizes = [*self.llama_cpp]
        ours, theirs = (
            "/".join(f"{times[size]:.3g}" for size in sizes)
            for times in (self.ggufspec, self.llama_cpp)
        )
        passes = f"passes over {'/'.join(map(str, sizes))} tokens take"
        if not self.types:
            return f"llama.cpp's kernels: {passes} {theirs} ms, with ggufspec's {ours}"
        names = ", ".join(self.types)
        kept = ", with the file's weights beside them for prompts on a GPU" if self.both else ""
        return f"own kernels for {names}{kept}: {passes} {ours} ms, with llama.cpp's {theirs}"


class Placed(NamedTuple):
    """The devices of a model, and how many of its layers are on them; negative: all.

    overrides: tensors of these layers that are elsewhere.
    """

    devices: Sequence[str] = ()
    n_layers: int = 0
    overrides: Overrides = ()


def load(
    path: Path,
    load_file: Load,
    placed: Placed,
    *,
    writes: bool,
    phases: Phases,
    may_measure: bool = True,
) -> tuple[int | None, Choice]:
    """Load a model with the kernels that are fastest for it: (its pointer or None, the choice).

    The first time on this machine, it is loaded with llama.cpp's kernels and with ours, and passes
    over KERNEL_SIZES tokens decide; that is stored. writes: it is a model of its own, so that its
    passes can be measured. phases: of loading, of which `load_file` reports the share. may_measure:
    False: our kernels are used wherever they work.
    """
    usable: Mapping[str, int] = {}
    if environ.get(kernels.VARIABLE) != "off" and (writes or not placed.devices):
        usable = kernels.status().types
    measures = environ.get(kernels.VARIABLE) != "on" and writes and may_measure
    key = _key(path, placed, usable) if usable and measures else {}
    known = _recall(key, usable) if key else None
    if known is not None and not known.both:
        return _load(load_file, Offer({name: usable[name] for name in known.types})), known
    offer = Offer()
    with suppress(GgufspecError):  # llama.cpp says what is wrong with the file
        offer = _offer(read_header(path), placed, usable) if usable else offer
    if not offer.types:
        return load_file(False), Choice()
    if known is not None and offer.both:
        return _load(load_file, offer), known
    if not measures:
        return _load(load_file, offer), Choice((*offer.types,), both=offer.both)
    with measuring():
        if known is not None or _recall(key, usable) is None:
            if is_busy(devices.n_threads_default()):
                return _unmeasured(load_file, offer)
            logger.warning(
                "ggufspec: %s is loaded with llama.cpp's kernels and with ggufspec's, to measure "
                "which are faster; this happens once",
                path.name,
            )
            sizes, began = (*KERNEL_SIZES, PROMPT) if placed.devices else KERNEL_SIZES, cpu_use()
            pointer, choice = _measure(load_file, offer, sizes, phases, began)
            times = [each.values() for each in (choice.llama_cpp, choice.ggufspec) if each]
            if pointer is None or len(times) < 2:
                return pointer, choice
            if were_disturbed(began, devices.n_threads_default()) or any(map(is_disturbed, times)):
                logger.warning(
                    "ggufspec: other programs have disturbed this, so the choice is not stored: "
                    "a later load measures again"
                )
                return pointer, choice
            profile_store.remember(key, {**choice._asdict(), "types": [*choice.types]})
            return pointer, choice
    # Another process has measured it.
    return load(path, load_file, placed, writes=writes, phases=phases)


def measuring() -> AbstractContextManager[None]:
    """Within the block, no other process measures: see profile_store."""
    return profile_store.measuring(
        lambda: logger.warning(
            "ggufspec: another process measures a model on this machine; this one waits for it"
        )
    )


def _unmeasured(load_file: Load, offer: Offer) -> tuple[int | None, Choice]:
    logger.warning(
        "ggufspec: other programs use the processor, so nothing is measured: ggufspec's kernels "
        "are used, and a later load measures whether they are faster"
    )
    return _load(load_file, offer), Choice((*offer.types,), both=offer.both)


def is_disturbed(times: Iterable[float]) -> bool:
    """Whether a pass took less time than a shorter one, as happens beside other programs."""
    return any(few > _DISTURBED * many for few, many in pairwise(times))


def recall(path: Path, placed: Placed) -> Choice | None:
    """The stored choice for a model on these devices; None if there is none yet."""
    usable = kernels.status().types
    return _recall(_key(path, placed, usable), usable) if usable else Choice()


def _key(path: Path, placed: Placed, usable: Mapping[str, int]) -> dict[str, object]:
    key: dict[str, object] = {
        **{"about": "kernels of a model", **kernels.build_key(), "model": fingerprint(path)},
        **{"extension": kernels.extension_files(), "types": [*usable]},
        **{"instructions": kernels.instructions(), "n_threads": devices.n_threads_default()},
    }
    if placed.devices:
        key |= {"devices": [*placed.devices], "n_gpu_layers": placed.n_layers}
    if placed.overrides:
        key["overrides"] = [*map(str, placed.overrides)]
    return key


def _recall(key: Mapping[str, object], usable: Mapping[str, int]) -> Choice | None:
    known = profile_store.recall(key) or {}
    sizes = (*KERNEL_SIZES, PROMPT) if "devices" in key else KERNEL_SIZES
    types = known.get("types")
    theirs, ours = (_times(known.get(of), sizes) for of in ("llama_cpp", "ggufspec"))
    if not isinstance(types, list) or theirs is None or ours is None:
        return None
    names = [name for name in usable if name in types]
    return Choice((*names,), theirs, ours, known.get("both") is True)


class Offer(NamedTuple):
    """The types of a model's weights that our kernels are offered for. both: see Choice."""

    types: Mapping[str, int] = MappingProxyType({})
    both: bool = False


def _offer(header: Header, placed: Placed, usable: Mapping[str, int]) -> Offer:
    """The offer for weights on the host; without types if there is no memory to pack them.

    Packed weights cannot be dropped from memory and read again, as those of a mapped file can.
    If a device computes prompts, the file's form is kept as well, as far as memory allows.
    """
    n_units = header.n_layers + 1  # the output is one more
    n_placed = placed.n_layers if 0 <= placed.n_layers < n_units else n_units
    n_host = n_units - (n_placed if placed.devices else 0)
    kinds, n_bytes = set(), 0
    for tensor in header.matrices:
        layer = tensor.layer
        is_on_host = (header.n_layers if layer is None else layer) < n_host
        if is_on_host or stays(placed.overrides, tensor.name):
            kinds.add(tensor.type)
            n_bytes += tensor.n_bytes
    free = devices.free_memory()
    if free is not None and n_bytes > free:
        return Offer()
    types = {name: number for name, number in usable.items() if name.upper() in kinds}
    return Offer(types, bool(placed.devices) and (free is None or _ROOM * n_bytes < free))


def _measure(
    load_file: Load, offer: Offer, sizes: Sequence[int], phases: Phases, began: CpuUse
) -> tuple[int | None, Choice]:
    """The model's pointer, and the choice from timed passes of the whole model.

    Ends early if other programs have disturbed the first ones.

    Our kernels are used for all types if one token is then no slower. Otherwise, for a model on the
    CPU alone, each type is tried on its own and kept if one token is no slower.
    """
    types, both = offer
    phases.n = _N_PHASES
    pointer, theirs = _timed(load_file, Offer(), sizes, phases)
    if pointer is None or theirs is None:
        return pointer, Choice()
    _free(pointer)
    if were_disturbed(began, devices.n_threads_default()):
        return _unmeasured(load_file, offer)
    pointer, together = _timed(load_file, offer, sizes, phases)
    if pointer is None or together is None or _is_faster(together, theirs):
        return pointer, Choice((*types,), theirs, together, both)
    chosen: dict[str, int] = {}
    singly = types if len(types) > 1 and PROMPT not in sizes else {}
    phases.n += 2 * len(singly)
    for name, number in singly.items():
        _free(pointer)
        pointer, times = _timed(load_file, Offer({name: number}), sizes, phases)
        if pointer is None or times is None:
            return pointer, Choice((name,))
        if _is_faster(times, theirs):
            chosen[name] = number
    _free(pointer)
    if not chosen:
        return load_file(False), Choice((), theirs, together)
    pointer, times = _timed(load_file, Offer(chosen), sizes, phases)
    return pointer, Choice((*chosen,), theirs, times)


def _timed(
    load_file: Load, offer: Offer, sizes: Sequence[int], phases: Phases
) -> tuple[int | None, Milliseconds | None]:
    """Load with our kernels for these types, and time passes; frees the model if that raises."""
    if (pointer := _load(load_file, offer)) is None:
        return None, None
    try:
        phases.end()
        times = _time(pointer, sizes, phases)
        phases.end()
        return pointer, times
    except BaseException:
        _free(pointer)
        raise


def _is_faster(times: Milliseconds, than: Milliseconds) -> bool:
    if times[1] > _NO_SLOWER * than[1]:
        return False
    of_text, of_text_than = (each.get(PROMPT, 0.0) + N_WRITTEN * each[1] for each in (times, than))
    ratios = (times[size] / than[size] for size in KERNEL_SIZES)
    return sum(ratios) < len(KERNEL_SIZES) and of_text <= _NO_SLOWER * of_text_than


def _times(found: object, sizes: Sequence[int]) -> Milliseconds | None:
    if not isinstance(found, dict) or {*found} != {*map(str, sizes)}:
        return None
    if not all(isinstance(each, float) and each > 0 for each in found.values()):
        return None
    return {int(size): float(milliseconds) for size, milliseconds in found.items()}


def _load(load_file: Load, offer: Offer) -> int | None:
    """Load one model with our kernels for these types; the offer ends afterwards."""
    _native.offer_kernels([*offer.types.values()], offer.both)
    try:
        return load_file(bool(offer.types))
    finally:
        _native.offer_kernels([])


def _free(pointer: int) -> None:
    with listening():
        llama_cpp.llama_model_free(pointer)


def _time(pointer: int, sizes: Sequence[int], phases: Phases) -> Milliseconds | None:
    """Milliseconds of the model's passes on an empty cache; None if it has none."""
    if llama_cpp.llama_model_has_encoder(pointer) or not llama_cpp.llama_model_has_decoder(pointer):
        return None
    found: dict[int, list[float]] = {size: [] for size in sizes}
    began = perf_counter()
    with closing(BareContext(pointer, max(sizes))) as context:
        for i in range(_N_PASSES):
            for size in sizes:
                if size == PROMPT and sum(found[size]) > _PROMPT_MILLISECONDS:
                    continue
                seconds = context.seconds(size, max(KERNEL_SIZES))
                if seconds is None:
                    return None
                found[size].append(1000 * seconds)
                phases(min(sum(map(len, found.values())) / len(sizes) / _N_LEAST, 1.0))
            if i + 1 >= _N_LEAST and perf_counter() - began > _SECONDS:
                break
    return {size: min(times) for size, times in found.items()}
