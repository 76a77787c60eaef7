"""Types and sizes are those that llama-quantize gives, and that published files have."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from small import small

from ggufspec import standin
from ggufspec.models.header import read_header
from ggufspec.models.named_shape import header_of_name
from ggufspec.models.quantization import ARCHITECTURES, FILE_TYPES, header_of
from ggufspec.models.registry import Dimensions, load_registry

MIXES = [mix for mix in FILE_TYPES if mix not in ("F32", "F16", "BF16")]


def quantized(source: Path, mix: str) -> dict[str, str]:
    """The types that llama.cpp gives to the tensors of a model."""
    path = source.with_name(f"{mix}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[mix][0], 1
    done = llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params)
    assert done == 0
    types = {tensor.name: tensor.type for tensor in read_header(path).tensors}
    path.unlink()
    return types


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixes")


SMALL = {"n_vocab": 512, "n_ff": 256}
NARROW = {"n_layers": 2, "n_embd": 192, "n_embd_head": 48, **SMALL}  # no K-quants fit
OF_K = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
CASES = [
    *((small(n_layers=9, **SMALL), mix) for mix in MIXES),
    *((small(n_layers=16, **SMALL), mix) for mix in ("Q3_K_M", "Q4_K_S")),
    (small(n_layers=80, n_heads_kv=1, **SMALL), "Q3_K_S"),
    *((small(n_layers=3, n_heads_kv=1, tied=True, **SMALL), mix) for mix in OF_K),
    *((small(**NARROW), mix) for mix in OF_K),
    (small("gpt2", n_layers=4, tied=True, **SMALL), "Q4_K_M"),
    *((small("qwen3moe", n_layers=3, **SMALL), mix) for mix in OF_K),
    *((small(name, n_layers=3, **SMALL), "MXFP4_MOE") for name in ("gpt-oss", "glm4moe")),
]


@pytest.mark.parametrize(
    ("shape", "mix"),
    CASES,
    ids=[f"{of.architecture}-{of.n_layers}-{of.n_embd}-{of.tied}-{mix}" for of, mix in CASES],
)
def test_types_are_those_of_llama_quantize(shape: Dimensions, mix: str, folder: Path) -> None:
    source = folder / f"{shape.architecture}-{shape.n_layers}-{shape.n_embd}-{shape.tied}.gguf"
    if not source.exists():
        standin.write(standin.plan(header_of("small", shape, "F16")), source)
    ours = header_of("small", shape, mix)
    assert {tensor.name: tensor.type for tensor in ours.tensors} == quantized(source, mix)


def test_the_70b_of_the_published_log_is_as_large() -> None:
    assert header_of_name("70B-Q3_K_S").n_tensor_bytes == pytest.approx(30.9e9, rel=0.001)


def test_every_registered_model_can_be_stood_in_for() -> None:
    shapes = [entry.shape for entry in load_registry().models.values() if entry.shape]
    assert {shape.architecture for shape in shapes} <= set(ARCHITECTURES)
