"""The stand-in writes what the embedded target writes, and its file is whole or absent."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from full_disk import longest_file
from numpy.typing import NDArray
from small import logits

from ggufspec.common.files import default_cache_dir
from ggufspec.errors import CacheError, OptionError
from ggufspec.models.header import read_header
from ggufspec.models.quantization import n_params_of
from ggufspec.standin.embedded import embedded_draft, embedded_target
from ggufspec.standin.padded import (
    cached_target,
    padded_file,
    padded_target,
    parse_size,
    plan_dimensions,
)

SMALLEST = 10_000_000  # the embedded width, two layers more: 18 MB
WIDER = 50_000_000  # twice the width and the layers: 90 MB
WIDEST = 172_000_000  # four times the width: 344 MB
TOLERANCE = 0.05  # of a logit, whose deviation is about 3: Q8_0 is multiplied otherwise than F16


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@functools.cache
def read(path: Path) -> gguf.GGUFReader:
    """Each file is read once: its vocabulary takes half a second."""
    return gguf.GGUFReader(path)


def in_f16(tensor: gguf.ReaderTensor) -> NDArray[np.float16 | np.float32]:
    """A tensor's values: matrices in F16, vectors in F32."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return values.astype(np.float16) if values.ndim == 2 else values


@pytest.mark.parametrize("n_params", [WIDER, WIDEST])
def test_a_stand_in_computes_what_the_embedded_target_computes(n_params: int, cache: Path) -> None:
    path = padded_target(n_params, cache)
    assert read_header(path).tokens == read_header(embedded_target()).tokens
    tokens = range(300, 340)
    ours, theirs = logits(path, tokens), logits(embedded_target(), tokens)
    assert np.abs(ours - theirs).mean() < TOLERANCE


def test_the_file_says_what_it_is(cache: Path) -> None:
    n_params = WIDEST
    reader = read(padded_target(n_params, cache))
    source = read(embedded_target())
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values["general.name"] == "classics-target as a stand-in of 172M"
    assert "cost-padded stand-in" in values["general.description"]
    assert values["general.license"] == "CC0-1.0"
    for key, field in source.fields.items():
        if key.startswith("tokenizer."):
            assert values[key] == field.contents()
    assert values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5 / 4)
    assert values["llama.embedding_length"] == plan_dimensions(n_params).n_embd
    file = padded_file(n_params)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == file.n_params
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == file.n_tensor_bytes


@pytest.mark.parametrize(("n_params", "n_copies", "scale"), [(WIDER, 2, 1), (WIDEST, 1, 0.5)])
def test_every_weight_is_kept_and_the_rest_is_zero(
    n_params: int, n_copies: int, scale: float, cache: Path
) -> None:
    tensors = read(padded_target(n_params, cache)).tensors
    wide = {tensor.name: tensor.data for tensor in tensors}
    for tensor in read(embedded_target()).tensors:
        narrow = in_f16(tensor)
        if narrow.ndim == 1:
            narrow = narrow * np.float32(scale)
        elif tensor.name.startswith("token_embd"):
            narrow = np.tile(narrow, (1, n_copies))
        elif "attn_output" in tensor.name or "ffn_down" in tensor.name:
            narrow = np.tile(narrow, (n_copies, 1))
        data = wide.pop(tensor.name)
        corner = tuple(slice(n) for n in narrow.shape)
        assert np.array_equal(data[corner], narrow)
        assert np.count_nonzero(data) == np.count_nonzero(narrow)
    assert len(wide) == 9 * (plan_dimensions(n_params).n_layers - 6)
    assert not any(data.any() for data in wide.values())


@pytest.mark.parametrize("path", [embedded_target(), embedded_draft()])
def test_the_embedded_files_name_themselves(path: Path) -> None:
    fields = read(path).fields
    assert fields["general.name"].contents() == path.stem
    assert fields["general.license"].contents() == "CC0-1.0"
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0


def test_250m_is_the_shape_that_the_measurements_were_made_with() -> None:
    found = plan_dimensions(parse_size("250M"))
    assert (found.n_embd, found.n_layers, found.n_heads, found.n_ff) == (1024, 16, 32, 3072)
    assert padded_file(parse_size("250M")).n_params == 226_526_208


def test_every_size_is_met_within_16_percent() -> None:
    sizes = np.geomspace(10_000_000, 8_000_000_000, 100, dtype=np.int64).tolist()
    for n_params in sizes:
        found = n_params_of(plan_dimensions(n_params))
        assert found == pytest.approx(n_params, rel=0.16)
    widths = [plan_dimensions(n).n_embd for n in (sizes[0], 10**9, sizes[-1])]
    assert widths == [256, 2048, 4096]


@pytest.mark.parametrize(
    ("text", "n_params"),
    [("250M", 250_000_000), ("1.5b", 1_500_000_000), (" 8.03B ", 8_030_000_000)],
)
def test_sizes_are_read(text: str, n_params: int) -> None:
    assert parse_size(text) == n_params


@pytest.mark.parametrize("text", ["", "250", "-1B", "1.B", "nanB", "\u0662\u0665\u0660M", "250MB"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="such as 250M"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9.9M", "9B", "9" * 400 + "B"])
def test_sizes_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="ask for 10M to 8B"):
        parse_size(text)


def test_progress_ends_at_the_size_that_was_announced(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    path = padded_target(SMALLEST, tmp_path, lambda done, total: heard.append((done, total)))
    size = padded_file(SMALLEST).n_bytes
    assert path.stat().st_size == size
    assert heard[-1] == (size, size)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})


def test_a_cached_file_is_used_again(tmp_path: Path) -> None:
    assert cached_target(SMALLEST, tmp_path / "cache") is None
    path = padded_target(SMALLEST, tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert cached_target(SMALLEST, tmp_path / "cache") == path
    assert padded_target(SMALLEST, tmp_path / "cache", _fail) == path
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", ["short", "header"])
def test_a_damaged_file_is_written_anew(damage: str, tmp_path: Path) -> None:
    path = padded_target(SMALLEST, tmp_path)
    whole = path.read_bytes()
    if damage == "header":
        path.write_bytes(whole[:1000] + b"?" + whole[1001:])
    else:
        os.truncate(path, len(whole) - 1)
    assert cached_target(SMALLEST, tmp_path) is None
    assert padded_target(SMALLEST, tmp_path).read_bytes() == whole


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def stop(n_done: int, n_bytes: int) -> None:
        if n_done > n_bytes // 2:
            assert len(list(tmp_path.iterdir())) == 1
            raise error

    with pytest.raises(error):
        padded_target(SMALLEST, tmp_path, stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_what_a_killed_run_left_goes_at_the_next(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib, ggufspec.standin.padded as padded\n"
        "def kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"padded.padded_target({SMALLEST}, pathlib.Path(sys.argv[1]), kill)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert cached_target(SMALLEST, tmp_path) is None
    path = padded_target(SMALLEST, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    with longest_file(5_000_001), pytest.raises(CacheError) as caught:
        padded_target(SMALLEST, tmp_path)
    told = str(caught.value)
    assert f"into the cache folder {tmp_path}: File too large. It needs 18 MB" in told
    assert "--cache-dir or the environment variable GGUFSPEC_CACHE" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("below", "reason"), [("", "a file, not a folder"), ("deeper", "[Nn]ot a directory")]
)
def test_a_file_in_place_of_the_folder_is_explained(
    below: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    folder = tmp_path / "cache" / below
    assert cached_target(SMALLEST, folder) is None
    with pytest.raises(CacheError, match=rf"{reason}.*--cache-dir") as caught:
        padded_target(SMALLEST, folder)
    assert str(folder) in str(caught.value)
    assert (tmp_path / "cache").read_text() == "not a folder"


def test_a_folder_in_place_of_the_file_is_explained(tmp_path: Path) -> None:
    path = padded_target(SMALLEST, tmp_path)
    path.unlink()
    (path / "something").mkdir(parents=True)
    with pytest.raises(CacheError, match="--cache-dir"):
        padded_target(SMALLEST, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_overtakes_another_leaves_it_alone(tmp_path: Path) -> None:
    results: list[Path] = []

    def overtake(n_done: int, n_bytes: int) -> None:
        if not results and n_done > n_bytes // 2:
            (ours,) = tmp_path.iterdir()
            results.append(padded_target(SMALLEST, tmp_path))
            assert sorted(tmp_path.iterdir()) == sorted([ours, *results])

    path = padded_target(SMALLEST, tmp_path, overtake)
    assert results == [path]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="the rules of XDG")
@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("/large/cache", "/large/cache/ggufspec"),
        ("", "/home/anna/.cache/ggufspec"),
        ("relative", "/home/anna/.cache/ggufspec"),
    ],
)
def test_the_cache_folder_of_the_platform(
    variable: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GGUFSPEC_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache_dir() == Path(folder)


def _fail(n_done: int, n_bytes: int) -> None:
    raise AssertionError(f"{n_done} of {n_bytes} bytes were written")
