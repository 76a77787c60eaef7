"""GGUF files of real shapes without their weights: a header, and as many zeros, which take no disk.

llama.cpp reads them with no_alloc, and so tells what a model of tens of gigabytes would take.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ggufspec.models.gguf_file import GgufFile, Tensor
from ggufspec.models.header import Header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.quantization import header_of
from ggufspec.models.registry import Dimensions
from ggufspec.standin import plan

LLAMA_3_70B = header_of_name("meta-llama-3-70b-instruct:Q3_K_S")
LLAMA_3_8B = header_of_name("meta-llama-3-8b-instruct:Q3_K_L")
QWEN_3_30B = header_of_name("Qwen3-30B-A3B-Q4_K_M")
CODELLAMA_34B = header_of(
    "34b", Dimensions("34b", "llama", 48, 8192, 22016, 64, 8, 128, 32000, 16384), "Q8_0"
)
CODELLAMA_7B = header_of(
    "7b", Dimensions("7b", "llama", 32, 4096, 11008, 32, 32, 128, 32016, 16384), "Q4_K_M"
)
_GLM_4_5_AIR = Dimensions(
    *("glm", "glm4moe", 46, 4096, 1408, 96, 8, 128, 151552, 131072),
    n_experts=128,
    n_experts_used=8,
    n_experts_shared=1,
    n_dense_layers=1,
    n_ff_dense=10944,
)
GLM_4_5_AIR = header_of("glm", _GLM_4_5_AIR, "Q4_K_M")


def write(path: Path, of: Header) -> Path:
    """The file of a model, sparse."""
    return _write(path, plan(of))


def write_glm_with_mtp(path: Path) -> Path:
    """GLM-4.5-Air with its layer for multi-token prediction, sparse."""
    made, n_layers, n_embd = plan(GLM_4_5_AIR), _GLM_4_5_AIR.n_layers, _GLM_4_5_AIR.n_embd
    last = f"blk.{n_layers - 1}."
    layer = [each for each in made.tensors if each.name.startswith(last)]
    mtp = [each._replace(name=each.name.replace(last, f"blk.{n_layers}.")) for each in layer]
    own = {"eh_proj": (2 * n_embd, n_embd)}
    own |= dict.fromkeys(("embed_tokens", "shared_head_head"), (n_embd, _GLM_4_5_AIR.n_vocab))
    mtp += [
        Tensor(f"blk.{n_layers}.nextn.{name}.weight", shape, "Q4_K") for name, shape in own.items()
    ]
    counts = {"glm4moe.block_count": n_layers + 1, "glm4moe.nextn_predict_layers": 1}
    values = {**made.values, **counts}
    return _write(path, replace(made, values=values, tensors=(*made.tensors, *mtp)))


def _write(path: Path, made: GgufFile) -> Path:
    path.write_bytes(made.header)
    os.truncate(path, made.n_bytes)
    return path
