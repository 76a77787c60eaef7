"""GGUF files of real shapes without their weights: a header, and as many zeros, which take no disk.

llama.cpp reads them with no_alloc, and so tells what a model of tens of gigabytes would take.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_ALIGNMENT = 32


class Paper(NamedTuple):
    """The dimensions of a model of the Llama family, and the types of its weights."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    n_vocab: int
    n_ctx: int
    layers: Type
    values: Type  # of attn_v
    down: Type
    ends: tuple[Type, Type]  # of token_embd and of output


LLAMA_3_70B = Paper(
    80, 8192, 28672, 64, 8, 128256, 8192, Type.Q3_K, Type.Q5_K, Type.Q3_K, (Type.Q3_K, Type.Q6_K)
)  # Q3_K_S
LLAMA_3_8B = Paper(
    32, 4096, 14336, 32, 8, 128256, 8192, Type.Q3_K, Type.Q5_K, Type.Q5_K, (Type.Q3_K, Type.Q6_K)
)  # Q3_K_L
CODELLAMA_34B = Paper(
    48, 8192, 22016, 64, 8, 32000, 16384, Type.Q8_0, Type.Q8_0, Type.Q8_0, (Type.Q8_0, Type.Q8_0)
)
CODELLAMA_7B = Paper(
    32, 4096, 11008, 32, 32, 32016, 16384, Type.Q4_K, Type.Q4_K, Type.Q4_K, (Type.Q4_K, Type.Q6_K)
)  # about Q4_K_M


def write(path: Path, paper: Paper) -> Path:
    """The file of a model, sparse."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(paper.n_layers)
    writer.add_context_length(paper.n_ctx)
    writer.add_embedding_length(paper.n_embd)
    writer.add_feed_forward_length(paper.n_ff)
    writer.add_head_count(paper.n_heads)
    writer.add_head_count_kv(paper.n_heads_kv)
    writer.add_rope_dimension_count(paper.n_embd // paper.n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(paper.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    n_bytes = sum(_add(writer, *tensor) for tensor in _tensors(paper))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT
    os.truncate(path, start + n_bytes)
    return path


def _tensors(paper: Paper) -> list[tuple[str, tuple[int, ...], Type]]:
    embd, kv = paper.n_embd, paper.n_embd // paper.n_heads * paper.n_heads_kv
    found: list[tuple[str, tuple[int, ...], Type]] = [
        ("token_embd.weight", (paper.n_vocab, embd), paper.ends[0])
    ]
    for i in range(paper.n_layers):
        found += [
            (f"blk.{i}.{name}.weight", shape, kind)
            for name, shape, kind in (
                ("attn_norm", (embd,), Type.F32),
                ("attn_q", (embd, embd), paper.layers),
                ("attn_k", (kv, embd), paper.layers),
                ("attn_v", (kv, embd), paper.values),
                ("attn_output", (embd, embd), paper.layers),
                ("ffn_norm", (embd,), Type.F32),
                ("ffn_gate", (paper.n_ff, embd), paper.layers),
                ("ffn_up", (paper.n_ff, embd), paper.layers),
                ("ffn_down", (embd, paper.n_ff), paper.down),
            )
        ]
    return [
        *found,
        ("output_norm.weight", (embd,), Type.F32),
        ("output.weight", (paper.n_vocab, embd), paper.ends[1]),
    ]


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Type) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_bytes = int(np.prod(shape)) // block * block_bytes
    if kind == Type.F32:
        writer.add_tensor_info(name, list(shape), np.dtype(np.float32), n_bytes)
    else:
        stored = [*shape[:-1], shape[-1] // block * block_bytes]
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), n_bytes, raw_dtype=kind)
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
