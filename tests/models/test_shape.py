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
from ggufspec.models.named_shape import estimated_shape, shape_of_name, trimmed_shape
from ggufspec.models.quantization import file_type_of, header_of
from ggufspec.models.quants import quant_of
from ggufspec.models.registry import ModelEntry, TrimEntry, load_registry
from ggufspec.models.shape import draft_shape, shape_of

REGISTRY = load_registry()
# Small models are mostly embedding, whose type and doubling no name tells.
LARGE = sorted(
    alias for alias, entry in REGISTRY.models.items() if (entry.size or 0) > 4e9 and entry.shape
)


def entry(alias: str) -> ModelEntry:
    return REGISTRY.find(alias)


@pytest.mark.parametrize("alias", LARGE)
def test_dimensions_and_quantization_give_about_the_size_of_the_file(alias: str) -> None:
    """So a wrong dimension, or a wrong size, in the registry is found too."""
    known = entry(alias)
    assert known.size is not None
    exact = estimated_shape(known)
    assert exact.is_exact
    assert known.shape is not None
    mix = file_type_of(quant_of(known.files[0]) or "")
    # The layers of an MTP head are in the file, but are not loaded.
    header = header_of(alias, known.shape, mix) if mix else None
    n_mtp_bytes = sum(tensor.n_bytes for tensor in header.mtp_tensors) if header else 0
    assert exact.n_bytes + n_mtp_bytes == pytest.approx(known.size, abs=known.shape.n_layers)
    try:
        about = estimated_shape(replace(known, size=None))
    except ModelError:
        pytest.skip("of a quantization that only a size tells")
    assert not about.is_exact
    assert about.n_bytes == pytest.approx(known.size, rel=0.08)


def test_of_a_mixture_a_token_reads_a_few_experts() -> None:
    shape = estimated_shape(entry("Qwen3-30B-A3B-Q4_K_M"))
    assert shape.n_params == pytest.approx(30.5e9, rel=0.01)
    active = shape.layers[0].n_active_bytes / shape.layers[0].n_bytes
    assert active == pytest.approx(3.3 / 30.5, rel=0.25)


def test_a_name_is_the_file_where_it_is_there_and_the_registry_elsewhere(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    assert shape_of_name(str(path)) == shape_of(read_header(path))
    assert shape_of_name("70b-q3_k_s").n_layers == 80
    with pytest.raises(ModelError, match="models pull"):
        shape_of_name("someone/something:Q4_K_M")


def test_a_trimmed_draft_is_estimated_from_the_whole_model() -> None:
    known = entry("70B-Q3_K_S").shape
    assert known is not None
    whole, real = (
        shape_of(header_of("x", of, "Q4_0"))
        for of in (known, replace(known, n_vocab=32_064, n_layers=20))
    )
    of = replace(whole, n_vocab=known.n_vocab)
    made = trimmed_shape(of, TrimEntry("cut", "x", vocab=32_064, layers="0-9,70-79"))
    assert (made.n_layers, made.n_vocab, made.is_exact) == (20, 32_064, False)
    for name in ("n_bytes", "n_input_bytes", "n_output_bytes", "n_pass_bytes", "n_params"):
        assert getattr(made, name) == pytest.approx(getattr(real, name), rel=0.02), name
    with pytest.raises(ModelError, match="keeps none of the 80 layers"):
        trimmed_shape(of, TrimEntry("cut", "x", layers="80-90"))


def test_missing_dimensions_are_reported() -> None:
    known = entry("70B-Q3_K_S")
    with pytest.raises(ModelError, match="no dimensions"):
        estimated_shape(replace(known, shape=None))
    with pytest.raises(ModelError, match="IQ1_XYZ"):
        estimated_shape(replace(known, files=("model-IQ1_XYZ.gguf",)))


@pytest.mark.parametrize(
    ("write", "wrong"),
    [
        (tiny.write_llama, {"attention.layer_norm_rms_epsilon": float("nan")}),
        (tiny.write_llama, {"embedding_length": 64}),
        (tiny.write_llama, {"block_count": 0}),
        (tiny.write_llama, {"block_count": 2**31}),
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
