"""Images on the command line: `run --image`, and /image in a chat."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_projectors
from cli.conftest import ERROR, Command

import ggufspec


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its projector beside it."""
    folder = tmp_path_factory.mktemp("models")
    how: dict[str, Any] = {"vocab": tiny.BPE, "chat_template": tiny.CHATML, "n_ctx_train": 512}
    tiny_projectors.write_qwen2vl(folder / "mmproj-F16.gguf")
    return tiny_projectors.write_qwen2vl_model(folder / "target-Q4_0.gguf", **how)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(tiny_projectors.png(40, 24))
    return path


def wanted(seeing: Path, picture: Path) -> str:
    said = [{"type": "image", "path": picture}, {"type": "text", "text": "what"}]
    with ggufspec.load(seeing, n_threads=1, tuned=False) as engine:
        return engine.chat([{"role": "user", "content": said}], temperature=0, max_tokens=8).text


def test_run_asks_about_an_image(run: Command, seeing: Path, picture: Path) -> None:
    done = run("-m", seeing, "--image", picture, "-p", "what", "-n", "8", "--temp", "0")
    assert done.code == 0, done.err
    assert done.out == wanted(seeing, picture) + "\n"
    without = run("-m", seeing, "--image", picture, "-p", "what", "--no-mmproj")
    assert without.code == ERROR
    assert "reads no images" in without.err


def test_a_chat_takes_an_image_keeps_it_and_saves_it(
    command: Command, seeing: Path, picture: Path
) -> None:
    saved = picture.with_name("chat.json")
    lines = [f"/image {picture}", "what", f"/save {saved}", "/undo", f"/load {saved}", "what"]
    how = ("-m", seeing, "-n", "8", "--temp", "0", "-t", "1", "-c", "512")
    done = command("chat", *how, stdin="\n".join(lines).encode())
    assert done.code == 0, done.err
    assert "picture.png will be in the next message" in done.err
    assert done.out.startswith(wanted(seeing, picture) + "\n")
    for argument, why in (("/nowhere.png", "cannot be read"), (str(seeing), "should be an image")):
        failed = command("chat", *how, stdin=f"/image {argument}".encode())
        assert failed.code == ERROR
        assert why in failed.err


def test_a_batch_reads_images(command: Command, seeing: Path, picture: Path) -> None:
    encoded = base64.b64encode(picture.read_bytes()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    prompts, output = picture.with_name("prompts.jsonl"), picture.with_name("out.jsonl")

    def write(*parts: object) -> None:
        contents = [[part, {"type": "text", "text": "what"}] for part in parts]
        lines = [{"messages": [{"role": "user", "content": content}]} for content in contents]
        prompts.write_text("".join(json.dumps(each) + "\n" for each in lines))

    how = ("batch", prompts, "-o", output, "-m", seeing, "-n", "8", "--temp", "0", "-t", "1")
    write({"type": "image", "path": str(picture)}, url)
    done = command(*how)
    assert done.code == 0, done.err
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert texts == [wanted(seeing, picture)] * 2
    output.unlink()
    for parts, more, why in (
        ([url], ["--no-mmproj"], "reads no images"),
        ([url, {"type": "image", "path": "/nowhere.png"}], [], "prompt 2: "),
        ([{"type": "image", "path": str(seeing)}], [], "should be an image"),
        ([{"type": "video", "url": "a"}], [], "message 1 of line 1"),
    ):
        write(*parts)
        refused = command(*how, *more)
        assert refused.code == ERROR
        assert why in refused.err
        assert not output.exists(), "nothing is computed"


def test_plan_counts_the_projectors(command: Command, seeing: Path, tmp_path: Path) -> None:
    rows = command("plan", "-m", seeing, "--vram", "1GiB").out
    assert "projector: mmproj-F16.gguf, 0.2 MB with its buffers" in rows
    assert "projector" not in command("plan", "-m", seeing, "--vram", "1GiB", "--no-mmproj").out
    folder = Path(shutil.copytree(seeing.parent, tmp_path / "draft"))
    (folder / "mmproj-F16.gguf").rename(folder / "mmproj-draft.gguf")
    rows = command("plan", "-m", seeing, "-md", folder / seeing.name, "--vram", "1GiB").out
    assert "projector: mmproj-F16.gguf" in rows
    assert "projector: mmproj-draft.gguf" not in rows, "its name has a word that the draft's lacks"
    named = ("--mmproj-draft", folder / "mmproj-draft.gguf")
    rows = command("plan", "-m", seeing, "-md", folder / seeing.name, *named, "--vram", "1GiB").out
    assert "projector: mmproj-draft.gguf, 0.2 MB with its buffers" in rows
    alone = command("plan", "-m", seeing, *named, "--vram", "1GiB")
    assert "needs a draft model" in alone.err
