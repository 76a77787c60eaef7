"""The headers and shapes of named models: of files on this machine, else from the registry."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ggufspec.errors import ModelError
from ggufspec.models import local
from ggufspec.models.adapters import Adapters, with_adapters
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import DraftFile, check_model
from ggufspec.models.local import HubQuant
from ggufspec.models.pull import locate
from ggufspec.models.quantization import header_of
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import ModelEntry, Registry, load_registry
from ggufspec.models.shape import ModelShape, draft_shape, shape_of


def header_of_name(name: str, registry: Registry | None = None) -> Header:
    """The header of a named model: a file, a registered model, or dimensions with a quantization.

    Examples: `model.gguf`, `70B-Q3_K_S`, `user/repo:Q4_K_M`, `llama-2-13b:Q5_K_M`. A file on this
    machine is read; else the header is computed from registered dimensions, and its sizes are
    estimates within a few per cent. `registry`: None: the shipped one with the user's.
    Raises ModelError.
    """
    registry = registry or load_registry()
    known = {entry.shape.name: entry.shape for entry in registry.models.values() if entry.shape}
    stem, _, quantization = name.rpartition(":")
    if stem in known:
        return header_of(name, known[stem], quantization)
    try:
        paths = locate(name, registry)
        named = local.parse(name, registry)
    except ModelError as error:
        word = (stem or name).lower()
        near = [f"{each}:Q4_K_M" for each in get_close_matches(word, known, n=2, cutoff=0.6)]
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ModelError(f"{error}{hint}") from error
    if paths is not None:
        return read_header(paths[0])
    assert not isinstance(named, Path)
    entry = named if isinstance(named, ModelEntry) else None
    entries = [entry] if entry else registry.models.values()
    found = next((each.shape for each in entries if each.repo == named.repo and each.shape), None)
    if found is None:
        raise ModelError(
            f"{name} is not on this machine, and the registry has no dimensions for it: download "
            f"it first, with `ggufspec models pull {name}`"
        )
    quant = named.quant if isinstance(named, HubQuant) else quant_of(named.files[0])
    made = header_of(entry.alias if entry else name, found, quant or "")
    if found.tied and entry is not None and entry.size is not None:
        # Some files of tied models have a separate output matrix; their size shows it.
        untied = header_of(entry.alias, replace(found, tied=False), quant or "")
        return untied if untied.n_tensor_bytes <= entry.size else made
    return made


def adapted_shape(name: str, adapters: Adapters) -> ModelShape:
    """The shape of a named model with LoRA adapters. Raises ModelError."""
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
    header = header_of_name(name)
    if header.paths:
        return shape_of(header)
    n_vocab = header.tensor("token_embd.weight").shape[1]
    return replace(shape_of(header), n_vocab=n_vocab, is_exact=False)
