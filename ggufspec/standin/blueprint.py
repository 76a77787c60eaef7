"""What a model's file would hold, without the weights: from its header, or its registered shape.

Knows tensors, types and metadata; refuses to know what is written into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from ggufspec.common import gguf_bytes
from ggufspec.errors import ModelError
from ggufspec.models import names
from ggufspec.models.header import Header, read_header
from ggufspec.models.pull import locate
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import RegisteredShape, Registry, load_registry
from ggufspec.models.types import TYPES
from ggufspec.standin.architectures import ARCHITECTURES, tensors_of
from ggufspec.standin.mixes import FILE_TYPES, Facts, type_of

__all__ = ["Blueprint", "Planned", "blueprint_of", "of_header", "of_shape"]

_KINDS = {kind.name: (number, kind) for number, kind in TYPES.items()}
_EPSILON = 1e-5
_LAYERS_OF_70B = 80
_GEMMA_4B_WIDTH = 2560  # smaller ones of Gemma 3 have a smaller window
_OTHER_NAMES = {"FP16": "F16", "FP32": "F32"}


class Planned(NamedTuple):
    """A tensor: `shape` from the innermost dimension on, `type` by its name in TYPES."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def n_rows(self) -> int:
        """How many rows of shape[0] numbers it has, over all experts."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        _, kind = _KINDS[self.type]
        return self.shape[0] // kind.n_values * kind.n_bytes

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def info(self) -> gguf_bytes.TensorInfo:
        """As a header tells of it."""
        return gguf_bytes.TensorInfo(self.name, self.shape, _KINDS[self.type][0], self.n_bytes)


@dataclass(frozen=True)
class Blueprint:
    """A model: its name, and all that its file says but the vocabulary and the weights.

    entries: the metadata of its architecture, as bytes. file_type: llama_ftype.
    """

    name: str
    architecture: str
    entries: Mapping[str, bytes]
    file_type: int
    tensors: tuple[Planned, ...]

    @property
    def n_vocab(self) -> int:
        return self.tensor("token_embd.weight").shape[1]

    @property
    def n_embd(self) -> int:
        return self.tensor("token_embd.weight").shape[0]

    @property
    def n_layers(self) -> int:
        return 1 + max(
            int(name.split(".")[1]) for name, *_ in self.tensors if name.startswith("blk.")
        )

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the input's."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)

    @property
    def n_tensor_bytes(self) -> int:
        """Of all tensors in a file, the gaps between them included."""
        return sum(each.n_bytes + gguf_bytes.padding(each.n_bytes) for each in self.tensors)

    def tensor(self, name: str) -> Planned:
        """The tensor of that name. Raises ModelError."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise ModelError(f"{self.name} has no {name}: it is no model that writes text")


def blueprint_of(name: str, registry: Registry | None = None) -> Blueprint:
    """Of what a user names: a file, a registered model, its repository or its shape with a mix.

    `70B-Q3_K_S`, `model.gguf`, `user/repo:Q4_K_M`, `llama-2-13b:Q5_K_M`. What is on this machine is
    taken as its header has it. registry: None: the shipped one with the user's. Raises ModelError,
    also for what cannot be stood in for.
    """
    registry = registry or load_registry()
    shapes = {entry.shape.name: entry.shape for entry in registry.models.values() if entry.shape}
    stem, _, mix = name.rpartition(":")
    if stem in shapes:
        return of_shape(name, shapes[stem], mix.upper())
    try:
        paths = locate(name, registry)
        named = names.parse(name, registry)
    except ModelError as error:
        raise ModelError(f"{error}{_near(stem or name, shapes)}") from error
    if paths is not None:
        return of_header(read_header(paths[0]))
    assert not isinstance(named, names.LocalFile)
    entry = named.entry if isinstance(named, names.HubFiles) else None
    found = entry.shape if entry else _shape_of_repo(named.repo, registry)
    mixed = named.quant if isinstance(named, names.HubQuant) else quant_of(named.files[0])
    if found is None:
        raise ModelError(
            f"{name} is not on this machine, and the registry knows no dimensions of it: name a "
            "model of `ggufspec models list`, or a GGUF file"
        )
    if mixed is None:
        raise ModelError(f"the name of {name} does not tell its quantization{_known_mixes()}")
    made = of_shape(name, found, mixed.upper())
    if found.tied and entry is not None and entry.size is not None:
        # Some files have an output matrix of their own all the same: their size tells.
        other = of_shape(name, replace(found, tied=False), mixed.upper())
        if other.n_tensor_bytes <= entry.size:
            return other
    return made


def of_shape(name: str, shape: RegisteredShape, mix: str) -> Blueprint:
    """Of registered dimensions, quantized as llama-quantize does for that name of a mix.

    Raises ModelError for an architecture or a mix that is not known here.
    """
    mix = _OTHER_NAMES.get(mix, mix)
    _check_architecture(name, shape.architecture)
    if mix not in FILE_TYPES:
        raise ModelError(f"{name} is quantized as {mix or 'nothing'}{_known_mixes()}")
    facts = Facts(
        n_layers=shape.n_layers,
        n_shared=shape.n_heads // shape.n_heads_kv,
        n_experts=shape.n_experts or 0,
        is_tied=bool(shape.tied),
        is_70b=shape.n_layers == _LAYERS_OF_70B
        and (shape.architecture == "qwen2" or shape.n_heads != shape.n_heads_kv),
    )
    tensors = [
        Planned(tensor, sizes, type_of(tensor, sizes, mix, facts))
        for tensor, sizes in tensors_of(shape)
    ]
    values: dict[str, Any] = {
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layers,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_heads_kv,
    }
    if ARCHITECTURES[shape.architecture].is_gated:
        values["attention.key_length"] = values["attention.value_length"] = shape.n_embd_head
        values["rope.dimension_count"] = shape.n_embd_head
        values["attention.layer_norm_rms_epsilon"] = _EPSILON
    else:
        values["attention.layer_norm_epsilon"] = _EPSILON
    if shape.architecture == "gemma3":
        values["attention.sliding_window"] = 512 if shape.n_embd < _GEMMA_4B_WIDTH else 1024
    if shape.n_experts:
        values["expert_count"] = shape.n_experts
        values["expert_used_count"] = shape.n_experts_used or 1
        values["expert_feed_forward_length"] = shape.n_ff
    entries = _entries({f"{shape.architecture}.{key}": value for key, value in values.items()})
    return _checked(
        Blueprint(name, shape.architecture, entries, FILE_TYPES[mix][0], tuple(tensors))
    )


def of_header(header: Header) -> Blueprint:
    """Of a model whose file is there: its tensors, their types and its dimensions, exactly.

    Raises ModelError for an architecture or a tensor that is not known here.
    """
    _check_architecture(str(header.paths[0]), header.architecture)
    own = {
        key: value
        for key, value in header.values.items()
        if key.startswith(f"{header.architecture}.") and value is not None
    }
    file_type = header.values.get("general.file_type")
    tensors = tuple(Planned(each.name, each.shape, each.type) for each in header.tensors)
    return _checked(
        Blueprint(
            header.name,
            header.architecture,
            _entries(own),
            file_type if isinstance(file_type, int) else 0,
            tensors,
        )
    )


_LAYERED = re.compile(
    r"blk\.\d+\.(attn_(norm|q|k|v|qkv|output|q_norm|k_norm)|"
    r"post_(attention|ffw)_norm|"
    r"ffn_(norm|gate|up|down|gate_inp|gate_exps|up_exps|down_exps))\.(weight|bias)"
)
_ENDS = re.compile(
    r"(token_embd|position_embd|token_embd_norm|output_norm|output|rope_freqs)\.(weight|bias)"
)


def _checked(made: Blueprint) -> Blueprint:
    for tensor in made.tensors:
        if not (_LAYERED.fullmatch(tensor.name) or _ENDS.fullmatch(tensor.name)):
            raise ModelError(f"{made.name} has a tensor {tensor.name}, whose use is not known here")
    if made.is_tied and any("_exps" in tensor.name for tensor in made.tensors):
        raise ModelError(
            f"{made.name} is a mixture of experts whose output matrix is its embedding: no "
            "stand-in of that kind can be made"
        )
    return made


def _check_architecture(name: str, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{name} has the architecture {architecture}, of which no stand-in can be made; of "
            f"these it can: {', '.join(ARCHITECTURES)}"
        )


def _entries(values: Mapping[str, Any]) -> dict[str, bytes]:
    return dict(_entry(key, value) for key, value in values.items())


def _entry(key: str, value: Any) -> gguf_bytes.Entry:
    if isinstance(value, bool):
        return gguf_bytes.boolean(key, value)
    if isinstance(value, int):
        return gguf_bytes.uint32(key, value & 0xFFFFFFFF)
    if isinstance(value, float):
        return gguf_bytes.float32(key, value)
    if isinstance(value, str):
        return gguf_bytes.string(key, value)
    if value and isinstance(value[0], bytes):
        return gguf_bytes.strings(key, value)
    if value and isinstance(value[0], float):
        return gguf_bytes.floats(key, value)
    return gguf_bytes.int32s(key, value)


def _shape_of_repo(repo: str, registry: Registry) -> RegisteredShape | None:
    known: Iterator[RegisteredShape] = (
        entry.shape for entry in registry.models.values() if entry.repo == repo and entry.shape
    )
    return next(known, None)


def _known_mixes() -> str:
    return f"; known are {', '.join(FILE_TYPES)}"


def _near(word: str, shapes: Mapping[str, object]) -> str:
    near = [f"{each}:Q4_K_M" for each in get_close_matches(word.lower(), shapes, n=2, cutoff=0.6)]
    return f"; shapes of a like name: {', '.join(near)}" if near else ""
