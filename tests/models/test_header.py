"""Headers: what llama.cpp would say of a file, without it; and no belief in what cannot be true."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny

from ggufspec.errors import ModelError
from ggufspec.llama.model import Model
from ggufspec.models.gguf_file import TYPES, Tensor
from ggufspec.models.header import Header, read_header
from ggufspec.models.shape import shape_of

WRITERS: list[Callable[[Path], Path]] = [
    tiny.write_llama,
    tiny.write_swa,
    tiny.write_moe,
    tiny.write_mamba,
    tiny.write_rwkv,
    tiny.write_hybrid,
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_header_says_what_llama_cpp_says(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    header = read_header(path)
    model = Model(path)
    try:
        assert header.n_params == model.n_params
        assert sum(tensor.n_bytes for tensor in header.tensors) == model.n_bytes
        assert header.n_layers == model.n_layers
        assert header.n_ctx == model.n_ctx_train
        assert header.n_vocab == model.vocab.n_tokens
        assert header.architecture in model.description
        assert header.chat_template == model.chat_template
    finally:
        model.close()
    assert header.n_bytes == path.stat().st_size
    assert header.paths == (path,)


def test_a_file_is_parsed_again_only_after_it_changed(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf", n_layer=2)
    assert read_header(path) is not read_header(path), "it was written within the last second"
    os.utime(path, (1, 1))
    known = read_header(path)
    assert read_header(path) is known
    os.utime(tiny.write_llama(path, n_layer=3), (2, 2))
    assert (known.n_layers, read_header(path).n_layers) == (2, 3)


def test_each_value_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    values = read_header(path).values
    model = Model(path)
    try:
        buffer = ctypes.create_string_buffer(1 << 16)
        for key, value in values.items():
            if isinstance(value, (list, float, bool, type(None))):
                continue
            n = llama_cpp.llama_model_meta_val_str(model.pointer, key.encode(), buffer, len(buffer))
            assert n >= 0, key
            assert buffer.value.decode() == str(value), key
    finally:
        model.close()


def test_the_mix_of_types_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    _finish(writer)
    assert read_header(tmp_path / "model.gguf").quantization == "Q4_K_M"
    assert read_header(tiny.write_llama(tmp_path / "plain.gguf")).quantization == "F32"


def test_the_type_of_the_matrices_is_that_of_most_bytes_that_a_pass_reads() -> None:
    tensors = [
        Tensor("token_embd.weight", (256, 4096), "F16"),
        Tensor("blk.0.attn_norm.weight", (10**8,), "F32"),
        Tensor("blk.0.ffn_up.weight", (256, 600), "Q4_0"),
        Tensor("blk.0.ffn_down.weight", (256, 600), "Q4_0"),
        Tensor("output.weight", (256, 800), "Q4_0"),
        Tensor("blk.0.attn_q.weight", (256, 2100), "Q2_K"),  # more weights, fewer bytes
    ]
    values = {"general.architecture": "llama"}
    assert Header((), 0, values, tuple(tensors)).matrix_type == "Q4_0"
    tied = tuple(tensor for tensor in tensors if tensor.name != "output.weight")
    assert Header((), 0, values, tied).matrix_type == "F16"


def test_a_fingerprint_is_that_of_the_tokens_padding_aside(tmp_path: Path) -> None:
    def fingerprint(name: str, tokens: list[str]) -> str:
        writer = gguf.GGUFWriter(str(tmp_path / name), "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        _finish(writer)
        return read_header(tmp_path / name).vocabulary

    known = fingerprint("a", ["x", "yz"])
    assert fingerprint("b", ["x", "yz", "[PAD2]", "[PAD3]"]) == known
    assert fingerprint("c", ["xy", "z"]) != known
    assert fingerprint("d", ["x", "yz", "w"]) != known


def test_split_files_are_one_model(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    assert len(paths) == 3
    whole = read_header(paths[0])
    assert whole.paths == tuple(paths)
    assert whole.n_bytes == sum(path.stat().st_size for path in paths)
    assert [tensor.name for tensor in whole.tensors] == [f"blk.{i}.w" for i in range(6)]
    assert read_header(paths[2]).paths == tuple(paths), "whichever of them is named"


def test_a_split_model_that_lacks_a_file_says_which(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelError, match="-00002-of-00003"):
        read_header(paths[0])


def test_a_split_model_with_a_file_twice_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match="same tensor"):
        read_header(paths[0])


@pytest.mark.parametrize("n_tensors", [5, 7])
def test_a_split_model_with_another_number_of_tensors_is_refused(
    n_tensors: int, tmp_path: Path
) -> None:
    paths = write_split(tmp_path)
    data, key = paths[0].read_bytes(), text(b"split.tensors.count") + struct.pack("<I", 5)
    right, wrong = (key + struct.pack("<i", n) for n in (6, n_tensors))
    assert right in data
    paths[0].write_bytes(data.replace(right, wrong))
    with pytest.raises(ModelError, match=f"hold 6 tensors together, not {n_tensors}"):
        read_header(paths[0])


@pytest.mark.parametrize("first", [0, 1])
def test_files_of_a_split_model_that_were_appended_to_one_another_are_recognized(
    first: int, tmp_path: Path
) -> None:
    paths = write_split(tmp_path)
    joined = tmp_path / "whole.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths[first:]))
    with pytest.raises(ModelError, match=r"appended to one another \(with cat\?\)"):
        read_header(joined)
    joined.rename(paths[first])
    with pytest.raises(ModelError, match="appended to one another"):
        read_header(paths[0])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_what_has_no_end_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        read_header(tmp_path / "pipe")


def test_a_split_model_under_other_names_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    with pytest.raises(ModelError, match="must be like model-00001-of-00003"):
        read_header(paths[0].rename(tmp_path / "first.gguf"))


def write_split(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(
        str(folder / "model.gguf"), "llama", split_max_tensors=2, small_first_shard=False
    )
    writer.add_block_count(6)
    for i in range(6):
        writer.add_tensor(f"blk.{i}.w", np.ones(32, np.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("model-*.gguf"))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.9999])
def test_a_truncated_file_is_refused(share: float, tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ModelError, match=r"empty|truncated|ends within|not a GGUF"):
        read_header(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="folder"):
        read_header(tmp_path)
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_header(tmp_path / "page.gguf")


def header_bytes(n_tensors: int, n_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


ARCHITECTURE = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (header_bytes(0, 0, version=1), "version 1"),
        (header_bytes(0, 0, version=0x03000000), "version"),
        (header_bytes(2**60, 1), "claims"),
        (header_bytes(0, 2**60), "claims"),
        (header_bytes(0, 1, struct.pack("<Q", 2**63)), "ends within"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<I", 99)), "unknown type 99"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "invalid type 9"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**61)), "ends within"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<IIQ", 9, 4, 2**62)), "ends within"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**60)), "ends within"),
        (header_bytes(0, 1, text(b"")), "empty"),
        (header_bytes(0, 2, 2 * ARCHITECTURE), "duplicate"),
        (header_bytes(0, 1, text(b"k") + struct.pack("<II", 4, 1)), "architecture"),
        (header_bytes(1, 1, ARCHITECTURE + text(b"t") + struct.pack("<I", 9)), "dimensions"),
        (
            header_bytes(1, 1, ARCHITECTURE + text(b"t") + struct.pack("<IQIQ", 1, 4, 250, 0)),
            "type 250",
        ),
        (
            header_bytes(1, 1, ARCHITECTURE + text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0)),
            "shape",
        ),
        (
            header_bytes(
                1, 1, ARCHITECTURE + text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)
            ),
            "shape",
        ),
        (
            header_bytes(1, 1, ARCHITECTURE + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**50)),
            "truncated",
        ),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(
    data: bytes, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data + bytes(4096))
    with pytest.raises(ModelError, match=complaint):
        read_header(path)


def test_any_changed_byte_gives_a_header_or_an_error(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    n_refused = 0
    for _ in range(100):
        changed = bytearray(data)
        changed[rng.integers(4, 3000)] = rng.integers(256)
        path.write_bytes(changed)
        try:
            header = read_header(path)
            shape_of(header)
            assert header.vocabulary
        except ModelError:
            n_refused += 1
    assert 5 < n_refused < 95


def test_types_are_those_of_gguf() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {each.number: tuple(each)[1:] for each in TYPES.values()} == known


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
