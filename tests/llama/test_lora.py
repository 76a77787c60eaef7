"""LoRA adapters: logits and greedy text are those of llama.cpp with the same adapter."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import lora
import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.decoding.types import Logits
from ggufspec.errors import ModelError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.models.adapters import Adapter, Adapters
from ggufspec.models.header import read_header
from ggufspec.standin.embedded import embedded_target

N = 6
TOKENS = [1, *range(300, 299 + N)]
EMBEDDED = {
    "blk.0.attn_q.weight": (256, 256),
    "blk.1.ffn_down.weight": (768, 256),
    "output.weight": (256, 4096),
    "token_embd.weight": (256, 4096),
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return lora.write_lora(tmp_path / "lora.gguf", EMBEDDED, gain=0.3)


def logits(path: Path, adapters: Adapters = ()) -> Logits:
    with (
        closing(Model(path, adapters=adapters)) as model,
        closing(Context(model, ContextOptions(n_ctx=64, n_rows=N, n_threads=1))) as context,
    ):
        context.decode(TOKENS, N)
        return np.array(context.rows(0, N))


@contextmanager
def llama_cpp_alone(path: Path, adapters: Adapters) -> Iterator[Any]:
    """A function from tokens to their logits, by llama.cpp's functions and with its kernels."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 64, 1, 1
    defaults = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), defaults)
    at = [llama_cpp.llama_adapter_lora_init(model, os.fsencode(each.path)) for each in adapters]
    context = llama_cpp.llama_init_from_model(model, params)
    pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(at))(*at)
    scales = (ctypes.c_float * len(at))(*(each.scale for each in adapters))
    llama_cpp.llama_set_adapters_lora(context, pointers, len(at), scales)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(64, 0, 1)

    def score(tokens: list[int]) -> Logits:
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, True)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        assert llama_cpp.llama_decode(context, batch) == 0
        rows = (llama_cpp.llama_get_logits_ith(context, i) for i in range(len(tokens)))
        return np.array([np.ctypeslib.as_array(row, (n_vocab,)) for row in rows])

    yield score
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def test_logits_are_those_of_llama_cpp(adapter: Path) -> None:
    """Our kernels round the activations of Q8_0 to one scale for each 32, as llama.cpp does."""
    adapters = (Adapter(adapter, 0.5),)
    found, plain = logits(embedded_target(), adapters), logits(embedded_target())
    with llama_cpp_alone(embedded_target(), adapters) as score:
        wanted = score(TOKENS)
    assert np.abs(found - wanted).max() < 0.1 * wanted.std()
    assert np.abs(plain - wanted).max() > wanted.std()


def test_several_adapters_add_up_and_none_has_the_scale_0(target: Path, tmp_path: Path) -> None:
    files = [lora.write_lora(tmp_path / f"{i}.gguf", seed=i) for i in range(2)]
    first, second = (Adapter(file, 0.5) for file in files)
    plain = logits(target)
    assert np.array_equal(logits(target, (Adapter(files[0], 0.0),)), plain)
    found = logits(target, (first, second))
    with llama_cpp_alone(target, (first, second)) as score:
        assert np.abs(found - score(TOKENS)).max() < 1e-4
    for fewer in ((first,), (second,), ()):
        assert np.abs(found - logits(target, fewer)).max() > 0.1


@pytest.mark.parametrize("kind", ["moe", "mamba"])
def test_experts_and_recurrent_layers_can_have_adapters(tmp_path: Path, kind: str) -> None:
    write, name, what = {
        "moe": (tiny.write_moe, "blk.1.ffn_up_exps.weight", "qwen3moe"),
        "mamba": (tiny.write_mamba, "blk.1.ssm_in.weight", "mamba"),
    }[kind]
    model = write(tmp_path / "model.gguf")
    shape = read_header(model).tensor(name).shape
    file = lora.write_lora(tmp_path / "lora.gguf", {name: shape}, architecture=what)
    adapters = (Adapter(file),)
    found = logits(model, adapters)
    with llama_cpp_alone(model, adapters) as score:
        assert np.abs(found - score(TOKENS)).max() < 1e-3
    assert np.abs(found - logits(model)).max() > 0.01


def test_what_llama_cpp_does_not_load_is_an_error(target: Path, tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf", architecture="qwen2")  # not checked before
    with pytest.raises(ModelError, match=r"does not load the LoRA adapter .*\n.*arch mismatch"):
        Model(target, adapters=(Adapter(file),))


def test_too_little_memory_for_its_products_is_found_at_loading(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Context, *args: object) -> None:
        raise ggufspec.DecodeError("no room")

    monkeypatch.setattr(Context, "decode", fail)
    file = lora.write_lora(tmp_path / "lora.gguf")
    with pytest.raises(OutOfMemoryError, match="leave too little memory for its passes"):
        ggufspec.load(target, lora=[file], n_threads=1, n_ctx=64, tuned=False)
