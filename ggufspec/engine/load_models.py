"""Loads the models of a pair one after the other, each where the options place it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ggufspec.common import defaults
from ggufspec.common.progress import LoadProgress
from ggufspec.engine.load_options import LoadOptions
from ggufspec.llama.model import Model
from ggufspec.llama.rpc import RemoteDevice
from ggufspec.models.head_facts import MTP, HeadFacts


def load_models(
    options: LoadOptions, head: HeadFacts | None, rpc: Sequence[RemoteDevice], tell: LoadProgress
) -> Iterator[Model]:
    """Load target and draft. The caller closes each, also after an error.

    Raises ModelError, OptionError, OutOfMemoryError.
    """
    for name, load_model in _roles(options, head, rpc):
        tell(name, 0.0)
        yield load_model(progress=partial(tell, name))
        tell(name, 1.0)


def _roles(
    options: LoadOptions, head: HeadFacts | None, rpc: Sequence[RemoteDevice]
) -> Iterator[tuple[str, Callable[..., Model]]]:
    """What is loaded, in this order: its name in reports of progress, and how."""
    chosen = options.n_gpu_layers, options.n_gpu_layers_draft  # None: there is no GPU
    n_target, n_draft = (defaults.ALL_LAYERS if n is None else n for n in chosen)
    overrides = options.overrides or ()
    any_model = partial(Model, mmap=options.mmap, mlock=options.mlock, repack=options.repack)
    of_target = partial(
        any_model,
        options.target,
        rpc=rpc,
        measures=not options.exact,
        mtp=options.draft == MTP,
        overrides=overrides,
        adapters=options.lora,
        key_overrides=options.override_kv,
    )
    yield "target", partial(of_target, n_gpu_layers=n_target, tensor_split=options.tensor_split)
    of_draft = partial(any_model, gpu=options.main_gpu, key_overrides=options.override_kv_draft)
    if head is not None:
        # A head that reads memory of the target can use all devices that this may be on:
        # llama.cpp ends the process where a context has not the device of a tensor.
        reads_target = head.shares_cache or head.borrows_output
        of_draft = partial(any_model, rpc=rpc) if reads_target else of_draft
        of_draft = partial(of_draft, is_head=True, mtp=head.kind == MTP)
    if options.draft is not None and options.draft != MTP:
        of_draft = partial(of_draft, overrides=options.overrides_draft or ())
        draft = partial(of_draft, options.draft, adapters=options.lora_draft)
        yield "draft", partial(draft, n_gpu_layers=n_draft)
