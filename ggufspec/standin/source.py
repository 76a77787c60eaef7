"""Finds the header of the model that a stand-in imitates, in a file or from known dimensions."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ggufspec.errors import ModelError
from ggufspec.models import names
from ggufspec.models.header import Header, layer_of, read_header
from ggufspec.models.pull import locate
from ggufspec.models.quantization import ARCHITECTURES, FILE_TYPES, file_type_of, header_of
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import Dimensions, ModelEntry, Registry, TrimEntry, load_registry

_KNOWN_QUANTIZATIONS = f"; supported are {', '.join(FILE_TYPES)}"


def source_of(name: str, registry: Registry | None = None) -> Header:
    """The header of a named model: a file, a registered model, or dimensions with a quantization.

    Examples: `model.gguf`, `70B-Q3_K_S`, `user/repo:Q4_K_M`, `llama-2-13b:Q5_K_M`. A file on this
    machine is read. `registry`: None: the shipped one with the user's. Raises ModelError.
    """
    registry = registry or load_registry()
    known = {entry.shape.name: entry.shape for entry in registry.models.values() if entry.shape}
    stem, _, quantization = name.rpartition(":")
    if stem in known:
        return source_from_dimensions(name, known[stem], quantization)
    try:
        paths = locate(name, registry)
        named = names.parse(name, registry)
    except ModelError as error:
        word = (stem or name).lower()
        near = [f"{each}:Q4_K_M" for each in get_close_matches(word, known, n=2, cutoff=0.6)]
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ModelError(f"{error}{hint}") from error
    if paths is not None:
        return read_header(paths[0])
    assert not isinstance(named, Path)
    if isinstance(named, TrimEntry):
        raise named.not_made()
    entry = named if isinstance(named, ModelEntry) else None
    entries = [entry] if entry else registry.models.values()
    found = next((each.shape for each in entries if each.repo == named.repo and each.shape), None)
    wanted = named.quant if isinstance(named, names.HubQuant) else quant_of(named.files[0])
    if found is None:
        raise ModelError(
            f"{name} is not on this machine, and the registry has no dimensions for it: name a "
            "model of `ggufspec models list`, or a GGUF file"
        )
    if wanted is None:
        raise ModelError(f"the name of {name} has no quantization{_KNOWN_QUANTIZATIONS}")
    made = source_from_dimensions(name, found, wanted)
    if found.tied and entry is not None and entry.size is not None:
        # Some files of tied models have a separate output matrix; their size shows it.
        untied = source_from_dimensions(name, replace(found, tied=False), wanted)
        if untied.n_tensor_bytes <= entry.size:
            return untied
    return made


def source_from_dimensions(name: str, of: Dimensions, quantization: str) -> Header:
    """The header of a model with these dimensions, with the types that llama-quantize would choose.

    Raises ModelError for an architecture or a quantization that is not supported.
    """
    _check_architecture(name, of.architecture)
    if (known := file_type_of(quantization)) is None:
        raise ModelError(
            f"{name} is quantized as {quantization or 'nothing'}{_KNOWN_QUANTIZATIONS}"
        )
    return header_of(name, of, known)


_LAYERED = re.compile(
    r"blk\.\d+\.(attn_(norm|q|k|v|qkv|output|q_norm|k_norm|sinks)|"
    r"post_(attention|ffw)_norm|exp_probs_b|"
    r"nextn\.(eh_proj|embed_tokens|shared_head_head|enorm|hnorm|shared_head_norm)|"
    r"ffn_(norm|(gate|up|down)(_exps|_shexp)?|gate_inp))\.(weight|bias)"
)
_ENDS = re.compile(
    r"(token_embd|position_embd|token_embd_norm|output_norm|output|rope_freqs)\.(weight|bias)"
)


def without_mtp(of: Header) -> Header:
    """The same model without its layers for multi-token prediction."""
    left_out = of.mtp_layers
    if not left_out:
        return of
    own = {f"{of.architecture}.block_count": left_out.start}
    own[f"{of.architecture}.nextn_predict_layers"] = 0
    kept = tuple(tensor for tensor in of.tensors if layer_of(tensor.name) not in left_out)
    return replace(of, values={**of.values, **own}, tensors=kept)


def check_supported(of: Header) -> None:
    """Raise ModelError for an architecture or a tensor that stand-ins do not support."""
    _check_architecture(of.name, of.architecture)
    for tensor in of.tensors:
        if not (_LAYERED.fullmatch(tensor.name) or _ENDS.fullmatch(tensor.name)):
            raise ModelError(
                f"{of.name} has a tensor {tensor.name}, which stand-ins do not support"
            )
    if of.is_tied and any("_exps" in tensor.name for tensor in of.tensors):
        raise ModelError(
            f"{of.name} is a mixture of experts whose output matrix is its embedding, which "
            "stand-ins do not support"
        )


def _check_architecture(name: str, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{name} has the architecture {architecture}, which stand-ins do not support; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
