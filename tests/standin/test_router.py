"""A mixture's experts are chosen by token, and shared by tokens as in real mixtures."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
import llama_cpp._ggml
import numpy as np
import pytest
from numpy.typing import NDArray
from small import MIXTURES, N_VOCAB, small

from ggufspec import standin
from ggufspec.models.gguf_file import GgufFile
from ggufspec.models.registry import Dimensions
from ggufspec.placement.speeds import n_union
from ggufspec.standin.next_token_table import codes, successors

N_MOST = 16  # tokens of a pass
ROUTER = ".ffn_gate_inp.weight"


def planned(shape: Dimensions, mix: str = "F16") -> GgufFile:
    return standin.plan(standin.source_from_dimensions("small", shape, mix))


def a_text(n_tokens: int) -> list[int]:
    after, tokens = successors(N_VOCAB, 1.0), [300]
    while len(tokens) < n_tokens:
        tokens.append(int(after[tokens[-1]]))
    return tokens


def chosen(file: GgufFile, tokens: list[int], n_used: int) -> NDArray[np.int64]:
    """The experts of each layer with a router and each token: (n_routers, n_tokens, n_used)."""
    n_embd = file.tensors[0].shape[0]
    inputs = codes(successors(N_VOCAB, 1.0)[tokens], n_embd)  # normed, they stay what they are
    found = []
    for tensor, data in zip(file.tensors, file.data(), strict=True):
        if tensor.name.endswith(ROUTER):
            router = np.frombuffer(b"".join(data), "<f4").reshape(tensor.n_rows, -1)
            found.append(np.argsort(-(inputs @ router.T), axis=1)[:, :n_used])
    return np.array(found)


@pytest.mark.parametrize(
    ("n_experts", "n_used"), [(16, 2), (32, 4), (64, 8), (128, 4), (128, 8), (256, 8)]
)
def test_tokens_share_experts_as_in_real_mixtures(n_experts: int, n_used: int) -> None:
    shape = small(
        "qwen3moe", n_layers=8, n_ff=32, n_embd=1024, n_experts=n_experts, n_experts_used=n_used
    )
    experts = chosen(planned(shape), a_text(N_MOST * 8), n_used)
    is_used = np.zeros((*experts.shape[:2], n_experts), np.bool_)
    np.put_along_axis(is_used, experts, values=True, axis=2)
    passes = is_used.reshape(-1, N_MOST, n_experts)
    unions = np.logical_or.accumulate(passes, axis=1).sum(axis=2).mean(axis=0)
    real = [n_union(n, n_experts, n_used) for n in range(1, N_MOST + 1)]
    assert unions == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_llama_cpp_chooses_these_experts(architecture: str, tmp_path: Path) -> None:
    shape, tokens = small(architecture), a_text(12)
    file = planned(shape, "Q8_0")
    standin.write(file, tmp_path / "model.gguf")
    assert shape.n_experts is not None
    assert shape.n_experts_used is not None
    ours = np.sort(chosen(file, tokens, shape.n_experts_used), axis=2)
    ranked = ranked_by_llama_cpp(tmp_path / "model.gguf", tokens, shape.n_experts)
    assert len(ours) == shape.n_layers - (shape.n_dense_layers or 0)
    assert (np.sort(ranked[:, :, : shape.n_experts_used], axis=2) == ours).all()
    assert len(np.unique(ours, axis=1)[0]) > 4  # not the same for all tokens


def ranked_by_llama_cpp(path: Path, tokens: list[int], n_experts: int) -> NDArray[np.int32]:
    """All experts of each router for each token, best first, while llama.cpp computes."""
    ggml = ctypes.CDLL(str(llama_cpp._ggml.libggml_base_path / "libggml-base.so"))
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
