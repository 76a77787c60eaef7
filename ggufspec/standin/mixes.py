"""Which type llama-quantize gives to each tensor of a model, by the name of a file type. Pure.

Its rules without an importance matrix, as in llama_tensor_get_type of llama.cpp's llama-quant.cpp.
Refuses to know what the tensors are for beyond their names.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ggufspec.models.types import TYPES

__all__ = ["FILE_TYPES", "Facts", "type_of"]

# The names of mixes: (llama_ftype, the type of most tensors).
FILE_TYPES = {
    "F32": (0, "F32"),
    "F16": (1, "F16"),
    "BF16": (32, "BF16"),
    "Q4_0": (2, "Q4_0"),
    "Q4_1": (3, "Q4_1"),
    "Q5_0": (8, "Q5_0"),
    "Q5_1": (9, "Q5_1"),
    "Q8_0": (7, "Q8_0"),
    "Q2_K": (10, "Q2_K"),
    "Q3_K_S": (11, "Q3_K"),
    "Q3_K_M": (12, "Q3_K"),
    "Q3_K_L": (13, "Q3_K"),
    "Q4_K_S": (14, "Q4_K"),
    "Q4_K_M": (15, "Q4_K"),
    "Q5_K_S": (16, "Q5_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"),
}

_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BLOCKS = {kind.name: kind.n_values for kind in TYPES.values()}
_LAYER = re.compile(r"blk\.(\d+)\.")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")  # never quantized
_FEW_EXPERTS = 8  # Mixtral, for which there are rules of its own


class Facts(NamedTuple):
    """What the rules ask of a model. n_shared: heads of queries to one of keys."""

    n_layers: int
    n_shared: int
    n_experts: int
    is_tied: bool
    is_70b: bool  # llama.cpp takes it for a model of 70 B parameters


def type_of(name: str, shape: tuple[int, ...], mix: str, facts: Facts) -> str:
    """The type of a tensor; `shape` from the innermost dimension on."""
    base = FILE_TYPES[mix][1]
    if len(shape) < 2 or not name.endswith("weight") or name.endswith(_KEPT) or base == "F32":
        return "F32"
    if base in ("F16", "BF16"):
        return base
    kind = _chosen(name, shape[0], mix, base, facts)
    if shape[0] % _BLOCKS[kind]:
        kind = _FALLBACKS.get(kind, "F16")
    return "F16" if shape[0] % _BLOCKS[kind] else kind


def _chosen(name: str, n_columns: int, mix: str, base: str, facts: Facts) -> str:
    if name == "output.weight" or (name == "token_embd.weight" and facts.is_tied):
        return "Q8_0" if base == "Q8_0" or n_columns % _BLOCKS[base] else "Q6_K"
    matched = _LAYER.match(name)
    if matched is None:
        return base
    layer = int(matched[1])
    if "attn_v." in name or "attn_qkv." in name:
        return _of_values(layer, mix, base, facts, is_fused="attn_qkv." in name)
    if "ffn_down" in name:
        return _of_down(layer, mix, base, facts)
    if "attn_output." in name:
        if facts.n_experts == _FEW_EXPERTS:
            is_raised = mix in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M")
            return "Q5_K" if is_raised else base
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, base)
    if "attn_k." in name and facts.n_experts == _FEW_EXPERTS:
        return "Q8_0"
    return base


def _of_values(layer: int, mix: str, base: str, facts: Facts, *, is_fused: bool) -> str:
    kind = base
    if mix == "Q2_K":
        kind = "Q4_K" if facts.n_shared >= 4 else "Q3_K"
    elif mix == "Q3_K_M":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif mix == "Q3_K_L":
        kind = "Q5_K"
    elif mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, facts.n_layers):
        kind = "Q6_K"
    elif mix == "Q4_K_S" and layer < 4:
        kind = "Q5_K"
    if facts.is_70b and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if facts.n_experts == _FEW_EXPERTS else kind


def _of_down(layer: int, mix: str, base: str, facts: Facts) -> str:
    n = facts.n_layers
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < n // 16 else "Q4_K"
    if mix == "Q3_K_L":
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, n):
        return "Q6_K"
    if mix == "Q4_K_S" and layer < n // 8:
        return "Q5_K"
    return base


def _more_bits(layer: int, n: int) -> bool:
    """The first and the last eighth of the layers, and of those between each third."""
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
