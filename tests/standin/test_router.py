"""A mixture's experts are chosen by token, and shared by tokens as in real mixtures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experts import ranked_experts
from numpy.typing import NDArray
from small import MIXTURES, N_VOCAB, small

from ggufspec import standin
from ggufspec.models.gguf_file import GgufFile
from ggufspec.models.quantization import header_of
from ggufspec.models.registry import Dimensions
from ggufspec.placement.speeds import n_union
from ggufspec.standin.next_token_table import codes, successors

N_MOST = 16  # tokens of a pass
ROUTER = ".ffn_gate_inp.weight"


def planned(shape: Dimensions, mix: str = "F16") -> GgufFile:
    return standin.plan(header_of("small", shape, mix))


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


@pytest.mark.parametrize(("n_experts", "n_used"), [(16, 2), (128, 8), (256, 8)])
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
    ranked = ranked_experts(tmp_path / "model.gguf", tokens, shape.n_experts)
    assert len(ours) == shape.n_layers - (shape.n_dense_layers or 0)
    assert (np.sort(ranked[:, :, : shape.n_experts_used], axis=2) == ours).all()
    assert len(np.unique(ours, axis=1)[0]) > 4  # not the same for all tokens
