"""The shapes of named models: from files on this machine, else from the registry."""

from __future__ import annotations

from dataclasses import replace

from ggufspec.errors import ModelError
from ggufspec.models import local
from ggufspec.models.adapters import Adapters, with_adapters
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import read_header
from ggufspec.models.heads import DraftFile, check_model
from ggufspec.models.pull import locate
from ggufspec.models.quantization import file_type_of, header_of
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import ModelEntry, TrimEntry, load_registry
from ggufspec.models.shape import ModelShape, draft_shape, shape_of
from ggufspec.models.trim_facts import numbers_of

_USUAL_MIX = "Q4_K_M"  # proportions of tensors if a quantization is not in FILE_TYPES


def estimated_shape(entry: ModelEntry) -> ModelShape:
    """The shape of a registered model that is not on this machine, from its dimensions.

    Sizes are exact if the size of the file is registered, otherwise within a few per cent.
    Raises ModelError if too little is registered.
    """
    known = entry.shape
    quantization = quant_of(entry.files[0]) or "an unknown quantization"
    if known is None:
        raise ModelError(
            f"the registry has no dimensions for {entry.alias}: download it first, with "
            f"`ggufspec models pull {entry.alias}`"
        )
    mix = file_type_of(quantization)
    if mix is None and entry.size is None:
        raise ModelError(
            f"neither the bits of {quantization} nor the size of {entry.alias} are known: download "
            f"it first, with `ggufspec models pull {entry.alias}`"
        )
    header = header_of(entry.alias, known, mix or _USUAL_MIX)
    made = shape_of(header)
    n_layer_bytes = sum(layer.n_bytes for layer in made.layers)
    scale = 1.0  # factor for the layers that gives the file its registered size
    if entry.size is not None:
        n_mtp_bytes = sum(tensor.n_bytes for tensor in header.mtp_tensors)  # not loaded
        scale = (entry.size - n_mtp_bytes - made.n_bytes + n_layer_bytes) / n_layer_bytes
    sizes = ("n_bytes", "n_active_bytes", "n_ffn_bytes", "n_expert_bytes")
    layers = tuple(
        replace(layer, **{name: round(getattr(layer, name) * scale) for name in sizes})
        for layer in made.layers
    )
    return replace(made, layers=layers, n_vocab=known.n_vocab, is_exact=entry.size is not None)


def trimmed_shape(of: ModelShape, trim: TrimEntry) -> ModelShape:
    """Estimates the shape of a trimmed draft that is not made yet, from the whole model's shape."""
    n_vocab = min(trim.vocab or of.n_vocab, of.n_vocab)
    share = n_vocab / of.n_vocab
    kept = trim.layers and numbers_of(trim.layers)
    layers = tuple(layer for i, layer in enumerate(of.layers) if not kept or i in kept)
    if not layers:
        raise ModelError(f"{trim.alias} keeps none of the {of.n_layers} layers of {of.name}")
    made = replace(
        of,
        name=trim.alias,
        layers=layers,
        n_input_bytes=round(of.n_input_bytes * share),
        n_output_bytes=round(of.n_output_bytes * share),
        n_vocab=n_vocab,
        is_exact=False,
    )
    return replace(made, n_params=round(of.n_params * made.n_bytes / of.n_bytes))


def adapted_shape(name: str, adapters: Adapters) -> ModelShape:
    """The shape of a named model with LoRA adapters. Raises ModelError."""
    if not adapters:
        return shape_of_name(name)
    if not (paths := locate(name)):
        raise ModelError(
            f"{name} is not on this machine, and its LoRA adapters are compared with its file: "
            f"download it first, with `ggufspec models pull {name}`"
        )
    return shape_of(with_adapters(read_header(paths[0]), adapters))


def shapes_of_pair(target: str, draft: str | None) -> tuple[ModelShape, ModelShape | None]:
    """The shapes of a named target and draft. Raises ModelError and VocabError as `draft_shape`.

    A head is compared with its target only if the target's file is on this machine.
    """
    paths = locate(target)
    if not paths:
        if draft == MTP:
            raise ModelError(
                f"{target} is not on this machine, and only its file says what its MTP head takes: "
                f"download it first, with `ggufspec models pull {target}`"
            )
        return shape_of_name(target), shape_of_name(draft) if draft else None
    header = read_header(paths[0])
    check_model(header)
    if draft is None:
        return shape_of(header), None
    paths = () if draft == MTP else locate(draft, heads=True)
    at: DraftFile | None = MTP if draft == MTP else next(iter(paths or ()), None)
    return shape_of(header), draft_shape(header, at)[0] if at else shape_of_name(draft)


def shape_of_name(name: str) -> ModelShape:
    """The shape of a named model, from its file, else from the registry. Raises ModelError."""
    registry = load_registry()
    if (paths := locate(name, registry)) is not None:
        return shape_of(read_header(paths[0]))
    named = local.parse(name, registry)
    if isinstance(named, TrimEntry):
        return trimmed_shape(shape_of_name(named.of), named)
    if isinstance(named, ModelEntry):
        return estimated_shape(named)
    raise ModelError(
        f"{name} is not on this machine, and the registry has no dimensions for it: download it "
        f"first, with `ggufspec models pull {name}`"
    )
