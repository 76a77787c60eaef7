"""Reads which experts of a mixture llama.cpp chooses, while it computes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp._ctypes_extensions import load_shared_library
from llama_cpp._ggml import libggml_base_path
from numpy.typing import NDArray


def ranked_experts(path: Path, tokens: Sequence[int], n_experts: int) -> NDArray[np.int32]:
    """All experts of each router for each token, best first: (n_routers, n_tokens, n_experts)."""
    ggml = load_shared_library("ggml-base", libggml_base_path)
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_tensor_get.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    ]
    found = []

    @llama_cpp.ggml_backend_sched_eval_callback
    def look(tensor: int, ask: bool, _: int) -> bool:
        is_ranking = b"ffn_moe_argsort" in ggml.ggml_get_name(tensor)
        if is_ranking and not ask:
            experts = np.empty((len(tokens), n_experts), np.int32)
            ggml.ggml_backend_tensor_get(tensor, experts.ctypes.data, 0, experts.nbytes)
            found.append(experts)
        return is_ranking or not ask

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch, params.cb_eval = 64, 1, 1, look
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    assert llama_cpp.llama_decode(context, batch) == 0
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.array(found)
