"""Loads the models of a pair one after the other, each where the options place it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ggufspec.common import defaults
from ggufspec.common.progress import LoadProgress, Share
from ggufspec.engine.load_options import LoadOptions
from ggufspec.llama.kernel_offer import Placed
from ggufspec.llama.model import Model, usable_devices
from ggufspec.llama.rpc import RemoteDevice
from ggufspec.measure import kernels
from ggufspec.models.head_facts import MTP, HeadFacts


def load_models(
    options: LoadOptions, head: HeadFacts | None, rpc: Sequence[RemoteDevice], tell: LoadProgress
) -> Iterator[tuple[Model, str | None]]:
    """Load target and draft, with why their kernels are used. The caller closes each model.

    Raises ModelError, OptionError, OutOfMemoryError.
    """
    for name, load_model in _roles(options, head, rpc):
        tell(name, 0.0)
        yield load_model(partial(tell, name))
        tell(name, 1.0)


def _measured(path: Path, measures: bool, progress: Share, **how: Any) -> tuple[Model, str | None]:
    rpc = [device.name for device in how.get("rpc", ())]
    devices = usable_devices(rpc, how.get("gpu"))
    overrides = how["overrides"] if devices else ()

    def make(types: Collection[str] | None, share: Share) -> Model:
        return Model(path, own_kernels=types, progress=share, **how)

    placed = Placed(devices, how["n_gpu_layers"], overrides)
    measures = measures and how["repack"]
    return kernels.load(make, path, placed, measures=measures, progress=progress)


def _head(path: Path, progress: Share, **how: Any) -> tuple[Model, str | None]:
    return Model(path, is_head=True, progress=progress, **how), None


def _roles(
    options: LoadOptions, head: HeadFacts | None, rpc: Sequence[RemoteDevice]
) -> Iterator[tuple[str, Callable[[Share], tuple[Model, str | None]]]]:
    """What is loaded, in this order: its name in reports of progress, and how."""
    chosen = options.n_gpu_layers, options.n_gpu_layers_draft  # None: there is no GPU
    n_target, n_draft = (defaults.ALL_LAYERS if n is None else n for n in chosen)
    shared: dict[str, Any] = {name: getattr(options, name) for name in ("mmap", "mlock", "repack")}
    yield (
        "target",
        partial(
            _measured,
            options.target,
            not options.exact,
            rpc=rpc,
            mtp=options.draft == MTP,
            overrides=options.overrides or (),
            adapters=options.lora,
            key_overrides=options.override_kv,
            n_gpu_layers=n_target,
            tensor_split=options.tensor_split,
            **shared,
        ),
    )
    if options.draft is None or options.draft == MTP:
        return
    shared |= {"overrides": options.overrides_draft or (), "n_gpu_layers": n_draft}
    # A head that reads memory of the target can use all devices that this may be on:
    # llama.cpp ends the process where a context has not the device of a tensor.
    reads_target = head is not None and (head.shares_cache or head.borrows_output)
    of_rpc: dict[str, Any] = {"rpc": rpc}
    of_gpu = {"gpu": options.main_gpu, "key_overrides": options.override_kv_draft}
    shared |= of_rpc if reads_target else of_gpu
    shared |= {"adapters": options.lora_draft}
    if head is None:
        yield "draft", partial(_measured, Path(options.draft), True, **shared)
    else:
        yield "draft", partial(_head, Path(options.draft), mtp=head.kind == MTP, **shared)
