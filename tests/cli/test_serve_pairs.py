"""Several models for `serve`: what files, folders and the command line say of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import click
import httpx
import pytest
import tiny
from cli.conftest import started
from patience import PATIENCE, comes_true, is_alive

from ggufspec.cli.serve import command
from ggufspec.cli.serve_pairs import named_pairs, print_facts
from ggufspec.errors import OptionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs in folders of their own, and an MTP-less model with another vocabulary."""
    made = tmp_path_factory.mktemp("models")
    (made / "sub").mkdir()
    tiny.write_llama(made / "large.gguf", n_layer=8, n_embd=64)
    tiny.write_llama(made / "sub" / "other.gguf", vocab=tiny.BPE)
    (made / "broken.gguf").write_bytes(b"GGUF")
    return made


def pairs_of(*words: object) -> dict[str, list[str]] | None:
    return named_pairs(command.make_context("serve", [*map(str, words)]))


def test_one_target_is_no_case_for_a_router(folder: Path) -> None:
    assert pairs_of("-m", folder / "large.gguf") is None
    with pytest.raises(click.UsageError, match="--keep-alive needs several models"):
        pairs_of("-m", folder / "large.gguf", "--keep-alive", "3s")


def test_a_file_has_options_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    file = folder / "models.toml"
    file.write_text(
        "threads = 1\n[coder]\ntarget = 'large.gguf'\nn_ctx = 64\ntemp = 0.5\nmmap = false\n"
        "draft-text = ['models.toml']\n[writer]\nmodel = 'sub/other.gguf'\n"
        "tensor_split = [3, 1]\nexact = true\nslots = 1\nspm-infill = false\n"
        "chat-template-kwargs = {a = 1}\n"
    )
    found = pairs_of("--models", file, "--port", 5, "--api-key", "k", "--seed", 7, "-t", "2")
    assert found is not None
    assert [*found] == ["coder", "writer"]
    coder, writer = (" ".join(each) for each in found.values())
    for words in (
        *("--threads 1", "--ctx-size 64", "--temp", "0.5", "--no-mmap", "--seed 7"),
        *(f"--model {folder / 'large.gguf'}", "--alias coder", f"--draft-text {folder}"),
    ):
        assert words in coder
    for words in (
        "--tensor-split 3,1",
        "--parallel 1",
        "--exact",
        '--chat-template-kwargs {"a": 1}',
    ):
        assert words in writer
    for line in (coder, writer):
        assert "--port" not in line
        assert "--api-key" not in line, "other users can read it"
        assert "--spm-infill" not in line


def test_a_preset_of_llama_server_is_read(folder: Path) -> None:
    file = folder / "models.ini"
    file.write_text("version = 1\n[*]\nc = 64\n[a]\nmodel = large.gguf\nload-on-startup = 1\n"
                    "mmap = off\n[b]\nm = large.gguf\nngl = 0\nc = 32\n")  # fmt: skip
    found = pairs_of("--models-preset", file)
    assert found is not None
    a, b = (" ".join(each) for each in found.values())
    assert "--ctx-size 64" in a
    assert "--no-mmap" in a
    assert "--ctx-size 32" in b
    assert "--n-gpu-layers 0" in b


def test_a_folder_has_its_models_with_their_drafts(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.write_llama(folder / "small.gguf", n_layer=1, n_embd=32)
    found = pairs_of("--models-dir", folder)
    assert found is not None
    assert {*found} == {"large", "small", "other"}
    assert f"--draft {folder / 'small.gguf'}" in " ".join(found["large"])
    assert "--draft" not in " ".join(found["other"])
    assert "broken.gguf is left out" in capfd.readouterr().err


def test_targets_may_be_given_several_times(folder: Path) -> None:
    files = folder / "large.gguf", folder / "sub" / "other.gguf"
    found = pairs_of("-m", files[0], "-c", 64, "-m", files[1])
    assert found is not None
    assert [*found] == ["large", "other"]
    assert all("--ctx-size 64" in " ".join(line) for line in found.values())
    with pytest.raises(click.UsageError, match="--draft must be auto or mtp"):
        pairs_of("-m", files[0], "-m", files[1], "--draft", files[1])
    with pytest.raises(OptionError, match="two models are named large"):
        pairs_of("-m", files[0], "-m", files[0])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a]\ntarget = 'large.gguf'\nnonsense = 1", "a: No such option.*--nonsense"),
        ("[a]\nctx-size = 64", "a: it has no target"),
        ("[a]\ntarget = 'large.gguf'\nmmap = 'maybe'", "mmap is 'maybe'"),
        ("[a]\ntarget = 'large.gguf'\nctx-size = -1", "a: Invalid value for .*--ctx-size"),
        ("[a", "cannot be read"),
        ("", "there are no models in"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(folder: Path, text: str, reason: str) -> None:
    file = folder / "wrong.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=reason):
        pairs_of("--models", file)


def test_memory_is_predicted_from_the_options(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def facts(*words: object) -> dict[str, object]:
        line = ["--model", str(folder / "large.gguf"), *map(str, words)]
        print_facts(json.dumps({"lines": {"a": line}, "models_ram": 1000}))
        found = json.loads(capsys.readouterr().out)
        assert found["room"][1] == 1000 * 2**20
        known: dict[str, object] = found["pairs"]["a"]
        return known

    small, large = (facts("-c", n, "-ngl", 0)["memory"] for n in (64, 200_000))
    assert isinstance(small, list)
    assert isinstance(large, list)
    # 8 layers, 4 slots, keys and values of 2 heads with 16 numbers each.
    assert large[1] - small[1] >= 8 * 4 * (200_000 - 256) * 2 * 32 * 2
    with_cache = facts("-c", 64, "-ngl", 0, "--cache-ram", 100)["memory"]
    assert isinstance(with_cache, list)
    assert with_cache[1] - small[1] == (100 - 1000 // 16) * 2**20
    assert facts()["words"] == ["--cache-ram", "62", "--ctx-size", "256"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_nothing_is_left_after_kill_9_of_the_router(folder: Path) -> None:
    line = ("serve", "-m", folder / "large.gguf", "-m", folder / "sub" / "other.gguf", "-t", "1")
    with started(*line, "-fa", "off", "--port", "0") as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        body = {"model": "other", "prompt": "hi", "max_tokens": 1}
        asked = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
        assert asked.json()["model"] == "other"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        os.kill(process.pid, signal.SIGKILL)
        assert comes_true(lambda: not is_alive(int(children[0])))
