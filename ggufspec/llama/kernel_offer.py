"""Says for which weights of a model ggufspec's kernels can be used, and have memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import environ
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ggufspec import _native
from ggufspec.errors import GgufspecError
from ggufspec.llama import devices, kernels
from ggufspec.models.header import read_header
from ggufspec.placement.overrides import Overrides, stays

_ROOM = 2.5  # times the weights on the host: in the file's form, packed, and for other things


class Placed(NamedTuple):
    """The devices of a model, and how many of its layers are on them; negative: all.

    overrides: tensors of these layers that are elsewhere.
    """

    devices: Sequence[str] = ()
    n_layers: int = 0
    overrides: Overrides = ()


class Offer(NamedTuple):
    """The types of a model's weights that our kernels are used for: names and numbers of ggml's.

    both: weights are also kept in the file's form, which devices read for prompts.
    """

    types: Mapping[str, int] = MappingProxyType({})
    both: bool = False

    def only(self, types: Collection[str] | None) -> Offer:
        """The offer for some of its types; None: all."""
        if types is None:
            return self
        chosen = {name: number for name, number in self.types.items() if name in types}
        return Offer(chosen, self.both and bool(chosen))


def offer(path: Path, placed: Placed, *, writes: bool = True) -> Offer:
    """The offer for weights on the host; without types if there is no memory to pack them.

    Packed weights cannot be dropped from memory and read again, as those of a mapped file can.
    If a device computes prompts, the file's form is kept as well, as far as memory allows.
    writes: it is a model of its own, not a head.
    """
    if environ.get(kernels.VARIABLE) == "off" or (placed.devices and not writes):
        return Offer()
    usable = kernels.status().types
    try:
        header = read_header(path)
    except GgufspecError:  # llama.cpp says what is wrong with the file
        return Offer()
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
    types = {name: number for name, number in usable.items() if name.upper() in kinds}
    free = devices.free_memory()
    if not types or (free is not None and n_bytes > free):
        return Offer()
    return Offer(types, bool(placed.devices) and (free is None or _ROOM * n_bytes < free))


@contextmanager
def offered(to: Offer) -> Iterator[None]:
    """Within the block, a model that this thread loads uses our kernels for these types."""
    _native.offer_kernels([*to.types.values()], to.both)
    try:
        yield
    finally:
        _native.offer_kernels([])
