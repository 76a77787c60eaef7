"""A stand-in loads, writes its map, and is whole or absent; a draft has its share of the map."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import paper
import pytest
from small import N_VOCAB, logits, small

import ggufspec
from ggufspec import standin
from ggufspec.errors import ModelError
from ggufspec.models.header import Header, read_header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.quantization import header_of
from ggufspec.models.registry import Dimensions
from ggufspec.models.shape import shape_of
from ggufspec.standin.next_token_table import codes, successors

MAP = successors(N_VOCAB, 1.0)
CASES = [
    *(("llama", tied, mix) for tied, mix in ((False, "Q4_K_M"), (False, "Q3_K_S"), (True, "Q4_0"))),
    *(("qwen2", True, "Q5_K_M"), ("qwen3", True, "Q8_0"), ("gpt2", True, "Q4_K_M")),
    *(("bloom", False, "Q6_K"), ("gemma2", True, "Q4_K_M"), ("gemma3", True, "F16")),
    *(("qwen3moe", False, "Q4_K_M"), ("gpt-oss", False, "MXFP4"), ("glm4moe", False, "Q4_K_M")),
]


def written(path: Path, shape: Dimensions, mix: str, agreement: float = 1.0) -> Path:
    standin.write(standin.plan(header_of("small", shape, mix), agreement), path)
    return path


@pytest.mark.parametrize(("architecture", "tied", "mix"), CASES)
def test_it_loads_and_follows_the_table(
    architecture: str, tied: bool, mix: str, tmp_path: Path
) -> None:
    shape = small(architecture, tied=tied)
    target = written(tmp_path / "target.gguf", shape, mix)
    draft = written(tmp_path / "draft.gguf", shape, mix, 0.5)
    with ggufspec.load(target, draft, n_threads=1, n_ctx=512) as engine:
        done = engine.generate([300], max_tokens=40, temperature=0, n_draft=2)
    assert done.finish_reason == "length"
    assert_follows([300, *done.tokens])
    assert 0.2 < done.stats.acceptance < 0.55


def assert_follows(tokens: list[int]) -> None:
    assert all(MAP[before] == after for before, after in pairwise(tokens))


@pytest.mark.parametrize(("temperature", "n_draft"), [(0.0, 1), (0.8, 3)])
def test_a_draft_agrees_as_often_as_asked(temperature: float, n_draft: int, tmp_path: Path) -> None:
    """Also one of another shape, whose output matrix is its embedding."""
    agreement = 0.8
    target = written(tmp_path / "target.gguf", small(), "Q3_K_S")
    shape = small(tied=True, n_layers=2, n_ff=256)
    draft = written(tmp_path / "draft.gguf", shape, "Q4_0", agreement)
    asked = {"temperature": temperature, "n_draft": n_draft, "drafter": "model"}
    with ggufspec.load(target, draft, n_threads=1, n_ctx=1024) as engine:
        text = engine.generate([400], max_tokens=500, verify="rejection", seed=1, **asked)
    assert_follows(text.tokens)
    first = text.stats.accepted_by_position[0] / text.stats.drafted_by_position[0]
    assert first == pytest.approx(agreement, abs=0.02)
    expected = sum(agreement**i for i in range(1, n_draft + 1)) / n_draft
    assert text.stats.acceptance == pytest.approx(expected, abs=0.025)


def test_an_mtp_head_is_left_out(tmp_path: Path) -> None:
    path = paper.write_glm_with_mtp(tmp_path / "glm.gguf")
    with_head, made = read_header(path), standin.plan(str(path))
    assert with_head.n_mtp_layers == 1
    assert [each[:2] for each in made.tensors] == [
        each[:2] for each in standin.plan(paper.GLM_4_5_AIR).tensors
    ]
    assert made.values["glm4moe.block_count"] == with_head.n_layers - 1
    assert not made.values["glm4moe.nextn_predict_layers"]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_a_tied_model_is_as_certain(architecture: str, tmp_path: Path) -> None:
    """The successor's logit is the planned one; the others are those of other codes."""
    path = written(tmp_path / "model.gguf", small(architecture, tied=True), "Q4_K_M")
    for tokens in ([300], [5, 900, 301]):
        found = logits(path, tokens)[-1]
        assert found.argmax() == MAP[tokens[-1]]
        assert found.max() == pytest.approx(40, abs=1.5)
        assert np.delete(found, found.argmax()).std() == pytest.approx(40 / 128**0.5, rel=0.1)


def test_layers_do_not_affect_the_output(tmp_path: Path) -> None:
    """Logits are those of the last token's code, whatever came before; all of them are finite."""
    path = written(tmp_path / "model.gguf", small(), "Q3_K_M")
    rows = codes(np.arange(N_VOCAB), 256).astype(np.float64)
    for tokens in ([300], [5, 900, 300], [1000, 300]):
        planned = rows @ rows[MAP[300]] * 40 / 256
        assert np.abs(logits(path, tokens)[-1] - planned).max() < 0.5
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all()
        is_zero = "attn_output" in tensor.name or "ffn_down" in tensor.name
        assert values.any() != is_zero
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            assert len(np.unique(tensor.data)) > 200  # random bytes, whatever they mean


def test_the_file_is_what_was_planned(tmp_path: Path) -> None:
    shape = small(tied=True)
    made = standin.plan(header_of("70B-like", shape, "Q4_K_M"), 0.7)
    path = tmp_path / "model.gguf"
    standin.write(made, path)
    assert path.stat().st_size == made.n_bytes
    header = read_header(path)
    types = {tensor.name: (tensor.shape, tensor.type) for tensor in made.tensors}
    assert {tensor.name: (tensor.shape, tensor.type) for tensor in header.tensors} == types
    assert (header.name, header.n_vocab) == (
        "stand-in for 70B-like: shape only, the text means nothing",
        N_VOCAB,
    )
    assert header.quantization == "Q4_K_M"
    assert header.values["ggufspec.standin.like"] == "70B-like"
    assert header.values["ggufspec.standin.agreement"] == pytest.approx(0.7)
    assert shape_of(header).is_tied
    reader = gguf.GGUFReader(path)
    assert {
        each.name: (tuple(map(int, each.shape)), each.tensor_type.name) for each in reader.tensors
    } == types
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) <= made.n_tensor_bytes
    assert reader.get_field("tokenizer.ggml.model").contents() == "gpt2"


def test_one_of_a_file_has_its_tensors(tmp_path: Path) -> None:
    """Types that no mix of llama-quantize has, too: the header says which."""
    model = written(tmp_path / "model.gguf", small("qwen2", tied=True), "Q5_K_M")
    again = standin.plan(str(model))
    assert again.tensors == standin.plan(read_header(model)).tensors
    copy = tmp_path / "copy.gguf"
    standin.write(again, copy)
    ours, theirs = read_header(copy), read_header(model)
    assert ours.tensors == theirs.tensors
    of_architecture = [key for key in theirs.values if key.startswith("qwen2.")]
    assert of_architecture
    assert all(ours.values[key] == theirs.values[key] for key in of_architecture)
    with ggufspec.load(copy, model, n_threads=1, n_ctx=128) as engine:
        assert engine.generate([300], max_tokens=20, temperature=0).tokens[0] == MAP[300]


def test_words_of_a_text_are_tokens_again(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", small(n_layers=1), "Q8_0")
    with ggufspec.load(path, n_threads=1, n_ctx=256) as engine:
        tokens = engine.generate("Any text: ä, 中, 🦙.", max_tokens=12, temperature=0).tokens
        assert_follows(tokens)
        vocab = engine.vocab
        text = b"".join(vocab.piece(token) for token in tokens).decode()
        assert vocab.tokenize(text, add_special=False, parse_special=False) == list(tokens)
        any_text = "Any text: ä, 中, 🦙."
        again = vocab.tokenize(any_text, add_special=False, parse_special=False)
        assert b"".join(map(vocab.piece, again)).decode() == any_text
        assert not vocab.stop_tokens & set(MAP.tolist())


OTHER_ROUTERS = {"blk.0.ffn_gate_inp.weight": "Q8_0"}


def changed(of: Header, types: dict[str, str]) -> Header:
    tensors = (each._replace(type=types.get(each.name, each.type)) for each in of.tensors)
    return replace(of, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (header_of("m", small("mamba"), "Q4_0"), r"architecture mamba.*llama, qwen2"),
        (header_of("m", small(n_embd=32, tied=True), "Q4_0"), "too narrow"),
        (header_of("m", small(n_vocab=300), "Q4_0"), "at least 512"),
        (header_of("m", small("qwen3moe", tied=True), "Q4_0"), "mixture of experts"),
        (
            changed(header_of("m", small("qwen3moe"), "Q4_0"), OTHER_ROUTERS),
            r"gate_inp.weight in Q8_0.*are BF16, F16, F32$",
        ),
    ],
)
def test_what_cannot_be_stood_in_for_is_refused(of: Header, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        standin.plan(of)


def test_memory_stays_small() -> None:
    """At any size: of layers of 8 B parameters, and of its rows of 128256 tokens."""
    of = header_of_name("llama-3.1-8b-instruct:Q4_K_S")
    layer = [tensor for tensor in of.tensors if tensor.name.startswith("blk.31.")]
    ends = [of.tensor("token_embd.weight")._replace(shape=(4096, 16384))]
    made = standin.plan(replace(of, tensors=(*ends, *layer, of.tensor("output_norm.weight"))))
    tracemalloc.start()
    n_bytes = sum(len(chunk) for chunk in made.chunks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes == made.n_bytes > 150e6
    assert peak < 60e6
