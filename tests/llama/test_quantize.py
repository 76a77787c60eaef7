"""Requantized files: other types of weights, the same metadata; whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.errors import ModelError, OptionError
from ggufspec.llama.model import Model
from ggufspec.llama.quantize import requantize
from ggufspec.models.gguf_file import write
from ggufspec.models.header import read_header
from ggufspec.models.trim import trimmed


@pytest.fixture
def source(tmp_path: Path) -> Path:
    plain = tiny.write_llama(tmp_path / "plain.gguf", n_embd=256, n_layer=3)
    path = tmp_path / "source.gguf"
    write(trimmed(read_header(plain), tokens=range(320), layers=[0, 2]), path)
    return path


def test_types_change_and_the_metadata_stays(source: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    requantize(source, once, "Q8_0")
    requantize(once, twice, "Q4_0", output_type="q8_0")
    old, new = read_header(source), read_header(twice)
    types = {tensor.name: tensor.type for tensor in new.tensors}
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["output.weight"] == "Q8_0"
    assert new.quantization == "Q4_0"
    for key, value in old.values.items():
        if key != "general.file_type":
            assert new.values[key] == value
    Model(twice).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "Q4_9"}, "'Q4_9' is not a quantization"),
        ({"output_type": "I32"}, "'I32' is not a type of weights"),
    ],
)
def test_unknown_types(options: dict[str, Any], message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        requantize(source, tmp_path / "to.gguf", **{"quantization": "Q4_0", **options})


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    narrow = tiny.write_llama(tmp_path / "narrow.gguf")
    with pytest.raises(OptionError, match="is 32 wide, and Q6_K needs a multiple of 256"):
        requantize(narrow, tmp_path / "to.gguf", "Q4_0", output_type="Q6_K")


def test_what_llama_cpp_refuses_is_an_error(tmp_path: Path) -> None:
    broken = tiny.write_llama(tmp_path / "broken.gguf", header={"block_count": None})
    with pytest.raises(ModelError, match=r"(?s)could not quantize.*llama\.cpp: .*block_count"):
        requantize(broken, tmp_path / "to.gguf", "Q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_paths_that_must_not_be_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is the source model itself"):
        requantize(source, source, "Q4_0", force=True)
    with pytest.raises(OptionError, match="exists: name another file"):
        requantize(source, tmp_path / "plain.gguf", "Q4_0")
    requantize(source, tmp_path / "plain.gguf", "Q4_0", force=True)
    assert read_header(tmp_path / "plain.gguf").quantization == "Q4_0"
