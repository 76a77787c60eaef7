"""Files of LoRA adapters: what fits a model, and what is refused before llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora
import numpy as np
import pytest
import tiny

from ggufspec.errors import ModelError, OptionError
from ggufspec.models.adapters import Adapter, adapters_of, with_adapters
from ggufspec.models.header import read_header
from ggufspec.models.heads import check_model
from ggufspec.models.shape import shape_of
from ggufspec.standin.embedded import embedded_target

Q, DOWN = lora.SHAPES
N_VOCAB = len(tiny.SPM)


def test_an_option_is_a_list_of_files_or_of_files_with_scales() -> None:
    given = ["a.gguf", Path("b.gguf"), ("c.gguf", 0.5), ["d.gguf", -1]]  # lists: from JSON
    scales = [1.0, 1.0, 0.5, -1.0]
    found = adapters_of("lora", given)
    assert found == tuple(Adapter(Path(f"{'abcd'[i]}.gguf"), scales[i]) for i in range(4))


@pytest.mark.parametrize(
    ("given", "regex"),
    [
        ("a.gguf", "must be a list of files"),
        ([5], "must be the path of a file"),
        ([("a.gguf", "much")], "must be a number"),
        ([("a.gguf", float("nan"))], "must be a finite number"),
        ([("a.gguf", 1e39)], "too large"),
    ],
)
def test_other_options_are_refused(given: Any, regex: str) -> None:
    with pytest.raises(OptionError, match=regex):
        adapters_of("lora", given)


def test_its_memory_is_counted_in_the_layers_that_it_changes(target: Path, tmp_path: Path) -> None:
    header = read_header(target)
    shapes = {**lora.SHAPES, "output.weight": (32, N_VOCAB), "token_embd.weight": (32, N_VOCAB)}
    file = lora.write_lora(tmp_path / "lora.gguf", shapes)
    alone, adapted = shape_of(header), shape_of(with_adapters(header, (Adapter(file),)))
    more = [b.n_bytes - a.n_bytes for a, b in zip(alone.layers, adapted.layers, strict=True)]
    assert more == [4 * 4 * (32 + 32), 4 * 4 * (64 + 32)]
    assert adapted.layers[1].n_ffn_bytes - alone.layers[1].n_ffn_bytes == more[1]
    of_ends = 4 * 4 * (32 + N_VOCAB)
    assert adapted.n_output_bytes - alone.n_output_bytes == of_ends
    assert adapted.n_input_bytes - alone.n_input_bytes == of_ends
    assert adapted.n_bytes - alone.n_bytes == sum(more) + 2 * of_ends


def test_its_type_is_not_that_of_the_model(tmp_path: Path) -> None:
    shapes = {"blk.0.ffn_up.weight": (256, 768), "blk.1.ffn_up.weight": (256, 768)}
    file = lora.write_lora(tmp_path / "lora.gguf", shapes, rank=1024)  # larger than the model
    header = read_header(embedded_target())
    assert with_adapters(header, (Adapter(file),)).matrix_type == header.matrix_type == "Q8_0"


def test_norms_are_read_over_as_llama_cpp_does(target: Path, tmp_path: Path) -> None:
    norm = {"blk.0.attn_norm.weight": np.ones(32, np.float32)}
    file = lora.write_lora(tmp_path / "lora.gguf", change=norm)
    adapted = with_adapters(read_header(target), (Adapter(file),))
    assert len(adapted.tensors) == len(read_header(target).tensors) + 4


FLAT = np.zeros((4, 32), np.float32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"header": {"general.type": "model"}}, "is no LoRA adapter: its general.type"),
    "another kind": ({"header": {"adapter.type": "vera"}}, "of the type 'vera'"),
    "activated": ({"header": {"adapter.alora.invocation_tokens": [1, 2]}}, "an activated LoRA"),
    "another model": ({"architecture": "qwen2"}, "its architecture is qwen2, the model's llama"),
    "a double": ({"header": {"adapter.lora.alpha": np.float64(2)}}, "a finite 32-bit float"),
    "no number": ({"header": {"adapter.lora.alpha": "2"}}, "alpha is '2'"),
    "not finite": ({"header": {"adapter.lora.alpha": float("nan")}}, "alpha is nan"),
    "nothing": ({"shapes": {}}, "has no tensors"),
    "half": ({"change": {f"{Q}.lora_b": None}}, r"only .lora_a of blk.0.attn_q.weight"),
    "other tensors": ({"change": {"blk.0.attn_q.bias": FLAT}}, "attn_q.bias is neither"),
    "missing": ({"shapes": {"blk.7.attn_q.weight": (32, 32)}}, "has no such tensor"),
    "narrow": ({"shapes": {Q: (16, 32)}}, r"are 16 x 4 and 4 x 32, and blk.0.* is 32 x 32"),
    "ranks": ({"change": {f"{Q}.lora_a": np.zeros((8, 32), np.float32)}}, "32 x 8 and 4 x 32"),
    "experts": ({"shapes": {Q: (32, 32, 2)}}, "32 x 4 x 2 and 4 x 32 x 2"),
    "embedding": ({"shapes": {"token_embd.weight": (N_VOCAB, 32)}}, "token_embd.weight is 32 x"),
    "whole numbers": ({"change": {f"{Q}.lora_a": FLAT.astype(np.int32)}}, "lora_a in I32; an"),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_that_do_not_fit_are_refused(target: Path, tmp_path: Path, what: str) -> None:
    how, regex = WRONG[what]
    file = lora.write_lora(tmp_path / "lora.gguf", **how)
    with pytest.raises(ModelError, match=regex) as caught:
        with_adapters(read_header(target), (Adapter(file),))
    assert str(file) in str(caught.value)


def test_scale_and_alpha_must_not_overflow(target: Path, tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf")
    with pytest.raises(OptionError, match="too large"):
        with_adapters(read_header(target), (Adapter(file, 3e38),))


def test_a_tied_embedding_cannot_be_changed(tmp_path: Path) -> None:
    weights = tiny.Weights()
    tensors = weights.ends(tiny.SPM, 32, 3.0) | weights.llama_layers(32, 2)
    del tensors["output.weight"]
    facts = {**tiny.transformer(32, 2, 256), "vocab_size": N_VOCAB}
    model = tiny.write_gguf(tmp_path / "tied.gguf", "llama", facts, tiny.SPM, tensors)
    file = lora.write_lora(tmp_path / "lora.gguf", {"token_embd.weight": (32, N_VOCAB)})
    with pytest.raises(ModelError, match="also the output matrix"):
        with_adapters(read_header(model), (Adapter(file),))


def test_missing_and_damaged_files_are_refused(target: Path, tmp_path: Path) -> None:
    header = read_header(target)
    with pytest.raises(ModelError, match="there is no file"):
        with_adapters(header, (Adapter(tmp_path / "no.gguf"),))
    data = lora.write_lora(tmp_path / "lora.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-64])
    with pytest.raises(ModelError, match="truncated"):
        with_adapters(header, (Adapter(tmp_path / "cut.gguf"),))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is a LoRA adapter, not a model: name it with --lora"):
        check_model(read_header(lora.write_lora(tmp_path / "lora.gguf")))
