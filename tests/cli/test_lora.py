"""--lora and --lora-draft: their forms, what they change, and in which commands they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lora
import pytest
from cli.conftest import Command

import ggufspec

GREEDY = ("-n", "12", "--temp", "0", "-c", "256", "-p", "hello world")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two adapters; a colon in a name is none of a scale."""
    monkeypatch.chdir(tmp_path)
    return [lora.write_lora(tmp_path / f"{name}.gguf", seed=len(name)) for name in ("a", "b:c")]


@pytest.mark.parametrize(
    ("given", "scales"),
    [
        (["--lora", "a.gguf"], [1.0, None]),
        (["--lora", "a.gguf:0.5"], [0.5, None]),
        (["--lora-scaled", "a.gguf:-2e-1,b:c.gguf:0.25"], [-0.2, 0.25]),
        (["--lora", "a.gguf", "--lora", "b:c.gguf"], [1.0, 1.0]),
    ],
)
def test_its_forms(
    run: Command, target: Path, files: list[Path], given: list[str], scales: list[float | None]
) -> None:
    found = run("-m", target, *GREEDY, "--json", *given)
    assert found.code == 0, found.err
    wanted = [(file, scale) for file, scale in zip(files, scales, strict=True) if scale is not None]
    how: dict[str, Any] = {"n_threads": 1, "n_ctx": 256, "n_remembered": 0}
    with ggufspec.load(target, lora=wanted, **how) as engine:
        text = engine.generate("hello world", max_tokens=12, temperature=0).text
    assert found.document["text"] == text
    assert found.document["settings"]["lora"] == [[str(file), scale] for file, scale in wanted]
    assert run("-m", target, *GREEDY, "--json").document["text"] != text


def test_a_file_that_is_no_adapter(
    run: Command, command: Command, target: Path, files: list[Path]
) -> None:
    for given, said in ((["no.gguf:2"], "there is no file"), ([target], "is no LoRA adapter")):
        found = run("-m", target, *GREEDY, "--lora", *given)
        assert found.code == 1
        assert said in found.err
    for args in (("models", "show", files[0]), ("plan", "-m", target, "-md", files[0])):
        found = command(*args)
        assert (found.code, found.out) == (1, "")
        assert "is a LoRA adapter, not a model: name it with --lora" in found.err


@pytest.mark.parametrize(
    "name", ["run", "compare", "serve", "batch", "bench", "audit", "tune", "plan"]
)
def test_all_commands_that_load_have_both(command: Command, name: str) -> None:
    text = command(name, "--help" if name == "plan" else "--help-all").out
    assert "--lora FILE[:SCALE]" in text
    assert "--lora-draft FILE[:SCALE]" in text


def test_a_plan_counts_them(command: Command, target: Path, draft: Path, tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf", rank=64)
    of_draft = lora.write_lora(
        tmp_path / "of_draft.gguf", {"blk.0.attn_q.weight": (32, 32)}, rank=64
    )
    plan = ("plan", "-m", target, "-md", draft, "--vram", "8GiB", "--json")
    plain = command(*plan).document
    found = command(*plan, "--lora", file, "--lora-draft", of_draft).document
    more = [found[of]["n_bytes"] - plain[of]["n_bytes"] for of in ("target", "draft")]
    assert more == [4 * 64 * (32 + 32 + 64 + 32), 4 * 64 * (32 + 32)]
    result = command(*plan[:3], "--lora", of_draft.with_name("none.gguf"))
    assert "there is no file" in result.err
    result = command("plan", "-m", "70B-Q3_K_S", "--lora", file)
    assert "download it first" in result.err


def test_a_batch_is_resumed_with_the_same_adapters_only(
    command: Command, target: Path, files: list[Path], tmp_path: Path
) -> None:
    """By their content, wherever they are."""
    (tmp_path / "copies").mkdir()
    prompts, output = tmp_path / "prompts.txt", tmp_path / "r.jsonl"
    prompts.write_text("one\ntwo\n")
    args = ("batch", prompts, "-o", output, "-m", target, "-n", "4", "-t", "1", "--temp", "0")
    found = command(*args, "--lora", files[0])
    assert found.code == 0, found.err
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    with ggufspec.load(target, lora=[files[0]], n_threads=1) as engine:
        assert texts == [
            engine.generate(prompt, max_tokens=4, temperature=0).text for prompt in ("one", "two")
        ]
    assert command(*args, "--lora", files[1], "--resume").code == 2
    assert command(*args, "--lora", f"{files[0]}:0.5", "--resume").code == 2
    copy = shutil.copy(files[0], tmp_path / "copies" / files[0].name)
    assert command(*args, "--lora", copy, "--resume").code == 0


def test_a_path_may_have_a_comma(run: Command, target: Path, tmp_path: Path) -> None:
    """A list is split only where each part exists."""
    with_comma, plain = (lora.write_lora(tmp_path / name) for name in ("x,y.gguf", "z.gguf"))
    for given, wanted in (
        ([f"{with_comma}:0.5"], [[str(with_comma), 0.5]]),
        ([with_comma, "--lora", plain], [[str(with_comma), 1.0], [str(plain), 1.0]]),
        ([f"{plain},{plain}:2"], [[str(plain), 1.0], [str(plain), 2.0]]),
    ):
        found = run("-m", target, *GREEDY, "--json", "--lora", *given)
        assert found.document["settings"]["lora"] == wanted
    missing = run("-m", target, *GREEDY, "--lora", f"{plain},none.gguf")
    assert f"{plain},none.gguf" in missing.err
