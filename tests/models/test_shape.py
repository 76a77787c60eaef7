"""Registered models whose file is not there: their sizes, estimated from dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_heads

from ggufspec.errors import ModelError
from ggufspec.models.header import read_header
from ggufspec.models.named_shape import header_of_name, shape_of_name
from ggufspec.models.registry import load_registry
from ggufspec.models.shape import draft_shape, shape_of

LARGEST_HEADER = 14_000_000  # a vocabulary, and its merges


def test_names_have_about_the_size_of_their_files() -> None:
    """So a wrong dimension, or a wrong size, in the registry is found too."""
    sized = [each for each in load_registry().models.values() if each.size and each.shape]
    assert len(sized) > 15
    for known in sized:
        found = shape_of_name(known.alias)
        assert not found.is_exact
        assert known.size is not None
        assert 500_000 < known.size - found.n_bytes < LARGEST_HEADER, known.alias


def test_of_a_mixture_a_token_reads_a_few_experts() -> None:
    shape = shape_of_name("Qwen3-30B-A3B-Q4_K_M")
    assert shape.n_params == pytest.approx(30.5e9, rel=0.01)
    active = shape.layers[0].n_active_bytes / shape.layers[0].n_bytes
    assert active == pytest.approx(3.3 / 30.5, rel=0.25)


def test_a_name_is_the_file_where_it_is_there_and_the_registry_elsewhere(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    assert shape_of_name(str(path)) == shape_of(read_header(path))
    assert (shape_of_name("70b-q3_k_s").name, shape_of_name("70b-q3_k_s").n_layers) == (
        "70B-Q3_K_S",
        80,
    )
    assert shape_of_name("llama-2-13b:Q5_K_M").n_vocab == 32_000
    repo = "bartowski/Llama-3.2-1B-Instruct-GGUF"
    assert shape_of_name(f"{repo}:Q8_0").n_bytes > shape_of_name(f"{repo}:Q4_K_M").n_bytes


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("someone/something:Q4_K_M", "models pull"),
        ("llama-2-13b:IQ1_S", "quantized as IQ1_S.*supported are F32, F16"),
        ("llama-2-13:Q4_0", "similar names: llama-2-13b:Q4_K_M"),
        ("bartowski/Llama-3.2-1B-Instruct-GGUF/x.gguf", "quantized as nothing"),
    ],
)
def test_names_without_a_header(name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        header_of_name(name)


@pytest.mark.parametrize(
    ("write", "wrong"),
    [
        (tiny.write_llama, {"attention.layer_norm_rms_epsilon": float("nan")}),
        (tiny.write_llama, {"embedding_length": 64}),
        (tiny.write_llama, {"block_count": 0}),
        (tiny.write_llama, {"block_count": 4096}),
        (tiny.write_llama, {"attention.head_count": True}),
        (tiny.write_hybrid, {"embedding_length": 7}),
        (tiny.write_hybrid, {"ssm.inner_size": 255}),
    ],
    ids=["epsilon", "width", "no layers", "many layers", "heads", "hybrid width", "state"],
)
def test_numbers_over_which_llama_cpp_would_end_the_process_are_refused(
    write: Callable[[Path], Path], wrong: dict[str, object], tmp_path: Path
) -> None:
    header = read_header(write(tmp_path / "model.gguf"))
    assert shape_of(header).n_layers
    values = {**header.values, **{f"{header.architecture}.{key}": of for key, of in wrong.items()}}
    with pytest.raises(ModelError, match="damaged"):
        shape_of(replace(header, values=values))


def test_two_tokens_of_one_text_are_refused(tmp_path: Path) -> None:
    header = read_header(tiny.write_llama(tmp_path / "model.gguf"))
    key, (first, *others) = "tokenizer.ggml.tokens", header.tokens
    for tokens in ([first, b"", *others[1:]], [first, first + b"\0more", *others[1:]]):
        same = replace(header, values={**header.values, key: tokens})
        if b"" in tokens:
            assert shape_of(same).n_vocab == len(tokens), "llama.cpp names an empty one"
            continue
        with pytest.raises(ModelError, match="tokens 0 and 1 have the same text"):
            shape_of(same)


def test_an_assistant_has_no_cache_of_its_own(tmp_path: Path) -> None:
    table = tiny_heads.Table()
    target = tiny_heads.write_gemma4(tmp_path / "gemma.gguf", table)
    draft = tiny_heads.write_gemma4_assistant(
        tmp_path / "mtp-gemma.gguf", tiny_heads.Head(table=table)
    )
    header = read_header(draft)
    shape, facts = draft_shape(read_header(target), draft)
    assert facts is not None
    assert facts.shares_cache
    assert shape.n_bytes == header.n_tensor_bytes
    assert sum(layer.n_kv_values for layer in shape.layers) == 0
