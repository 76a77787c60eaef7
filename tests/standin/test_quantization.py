"""Types and sizes are those that llama-quantize gives, and that published files have."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest
from small import MIXTURES, small

from ggufspec import standin
from ggufspec.models.header import read_header
from ggufspec.models.quantization import ARCHITECTURES, FILE_TYPES
from ggufspec.models.registry import Dimensions, load_registry

REGISTRY = load_registry()
MIXES = [mix for mix in FILE_TYPES if mix not in ("F32", "F16", "BF16")]
# With an importance matrix, or by a llama-quantize of 2023: a little larger.
OTHERS = {
    *("Llama-3.3-70B-Instruct-Q4_0", "Llama-3.2-1B-Instruct-Q4_0", "Llama-2-7B-Chat-Q2_K"),
    "GLM-4.5-Air-Q4_K_M",
}
PUBLISHED = sorted(
    alias
    for alias, entry in REGISTRY.models.items()
    if entry.size and entry.shape and alias not in OTHERS
)
LARGEST_HEADER = 14_000_000  # a vocabulary, and its merges


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
    *((small(n_layers=80, n_heads_kv=1, **SMALL), mix) for mix in ("Q3_K_S",)),
    *((small(n_layers=3, n_heads_kv=1, tied=True, **SMALL), mix) for mix in OF_K),
    *((small(tied=True, **NARROW), mix) for mix in OF_K),
    *((small(**NARROW), mix) for mix in OF_K),
    *((small("gpt2", n_layers=4, tied=True, **SMALL), mix) for mix in OF_K),
    *(
        (small(architecture, n_layers=3, **SMALL), mix)
        for architecture in MIXTURES
        for mix in (*OF_K, "MXFP4_MOE")
    ),
    *((small("glm4moe", n_layers=8, n_mtp_layers=1, **SMALL), mix) for mix in OF_K),
]


@pytest.mark.parametrize(
    ("shape", "mix"),
    CASES,
    ids=[f"{of.architecture}-{of.n_layers}-{of.n_embd}-{of.tied}-{mix}" for of, mix in CASES],
)
def test_types_are_those_of_llama_quantize(shape: Dimensions, mix: str, folder: Path) -> None:
    source = folder / f"{shape.architecture}-{shape.n_layers}-{shape.n_embd}-{shape.tied}.gguf"
    if not source.exists():
        of = standin.source_from_dimensions("small", shape, "F16")
        standin.write(standin.plan(of, mtp_agreement=0.5 if shape.n_mtp_layers else None), source)
    ours = standin.source_from_dimensions("small", shape, mix)
    assert {tensor.name: tensor.type for tensor in ours.tensors} == quantized(source, mix)


@pytest.mark.parametrize("alias", PUBLISHED)
def test_sizes_are_those_of_published_files(alias: str) -> None:
    """But for the header, whose vocabulary has other words."""
    known = REGISTRY.find(alias)
    ours = standin.source_of(alias, REGISTRY)
    assert known.size is not None
    assert 500_000 < known.size - ours.n_tensor_bytes < LARGEST_HEADER


def test_the_70b_of_the_published_log_is_as_large() -> None:
    assert standin.source_of("70B-Q3_K_S").n_tensor_bytes == pytest.approx(30.9e9, rel=0.001)


def test_every_registered_model_can_be_stood_in_for() -> None:
    assert {entry.shape.architecture for entry in REGISTRY.models.values() if entry.shape} <= set(
        ARCHITECTURES
    )
    shapes = {}  # some are registered in several quantizations
    for alias, entry in REGISTRY.models.items():
        if entry.shape:
            shapes[entry.shape.name] = alias
    for alias in shapes.values():
        standin.plan(standin.source_of(alias, REGISTRY), 0.5)
