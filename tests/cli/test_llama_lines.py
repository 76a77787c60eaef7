"""Command lines of llama.cpp: what they become, real ones, and its environment variables."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import tiny
from cli.conftest import Command, started
from cli.test_llama_options import READ, command_of
from hub import Hub
from patience import PATIENCE

from ggufspec.cli.llama_lines import translated

LINES = Path(__file__).parent / "data" / "llama_lines.txt"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "CUDA_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")


def translate(line: str) -> tuple[list[str], str]:
    name, *words = shlex.split(line)
    return translated(command_of(name), words)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("serve -fa", "--flash-attn on"),
        ("serve -fa -c 5", "--flash-attn on -c 5"),
        ("serve -fa 0 --port 1", "--flash-attn off --port 1"),
        ("run -fa auto", "-fa auto"),
        ("run -p -fa", "-p -fa"),
        ("serve -hf user/repo:Q8_0", "--model user/repo:Q8_0"),
        ("serve --hf-file f.gguf --hf-repo u/r:Q8_0", "--model u/r/f.gguf"),
        ("serve -ub 256 -b 2048", "-b 2048 --batch-size 256"),
        ("serve --ubatch_size 8 --top_k 4", "--top-k 4 --batch-size 8"),
        ("serve -hfd u/r --draft-max 16", "--draft-max 16 --draft u/r"),
        ("serve --draft 8 --draft d.gguf", "--draft-max 8 --draft d.gguf"),
        ("serve --spec-draft-n-max 0", "--drafter none"),
        ("serve --spec-type draft-mtp -md a.gguf", "--draft auto --yes -md a.gguf"),
        ("serve --spec-type ngram-mod,ngram-map-k", "--drafter ngram"),
        ("serve -n -1", "-n -1"),
        ("run -n -2 --temp -1", "-n -2 --temp -1"),
        ("serve --slots --host h", "--host h"),
        ("serve --slots 3", "--slots 3"),
        ("serve -lm mlock", "--no-mmap --mlock"),
        ("serve -dev none -devd CUDA1", "-ngl 0 --main-gpu 1"),
        ("serve --reasoning off", '--chat-template-kwargs {"enable_thinking":false}'),
        ("serve --reasoning-effort low", '--chat-template-kwargs {"reasoning_effort":"low"}'),
        ("serve --chat-template {{messages}}", "--chat-template {{messages}}"),
        ("serve --cors-origins a,b", "--cors-origin a --cors-origin b"),
        ("run -st -p hi", "--chat -p hi"),
        ("run --color -p hi", "--color on -p hi"),
    ],
)
def test_an_option_becomes_those_of_the_command(given: str, wanted: str) -> None:
    assert translate(given)[0] == wanted.split()


def test_a_line_says_what_has_no_effect() -> None:
    arguments, note = translate("serve --jinja -cb -tb 8 --draft-min 5 -c 64")
    assert arguments == ["-c", "64"]
    assert note == (
        "without effect here: --jinja, -cb (always on); -tb 8 (-t is for prompts, too); "
        "--draft-min 5 (the length with the highest expected tokens/s is chosen)"
    )
    assert translate("serve -c 64")[1] == ""


def test_a_system_message_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.")
    assert translate(f"chat -sysf {tmp_path}/system.txt")[0] == ["--system", "Be brief."]


def test_tokens_and_devices_are_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert translate("serve -hft secret -dev CUDA2,CUDA0")[0] == []
    assert (os.environ["HF_TOKEN"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("secret", "6,4")
    translate("run -dev Vulkan1")
    assert os.environ["GGML_VK_VISIBLE_DEVICES"] == "1"


def test_a_file_of_the_hub_needs_a_repository() -> None:
    with pytest.raises(click.UsageError, match="--hf-file needs the name of a repository"):
        translate("serve -hff a.gguf")


def real_lines() -> list[str]:
    return [line for line in LINES.read_text("utf-8").splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("line", real_lines())
def test_real_lines_are_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r"\S+\.jinja", line):
        (tmp_path / name).write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    given, _, refused = line.partition(" => ")
    name, *words = shlex.split(given)
    if refused:
        with pytest.raises(click.UsageError, match=f"no option {refused}. Instead: "):
            command_of(name).make_context(name, words)
        return
    with command_of(name).make_context(name, words) as context:
        assert context.params["target"] or context.params["models_dir"]
    assert len(real_lines()) >= 40


THINKING = "{{ messages[0].content }}{% if enable_thinking is not false %} a b c{% endif %}"


def test_a_line_of_llama_server_serves_a_model_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "m.gguf", vocab=tiny.BPE, chat_template=THINKING)
    hub.add("lab/m-GGUF", {"m-Q4_K_M.gguf": model.read_bytes(), "mmproj-F16.gguf": b"GGUF"})
    line = "serve -hf lab/m-GGUF -fa -c 64 -ub 32 -b 64 -np 1 -n 6 --jinja --reasoning off"
    process = started(*line.split(), "--port", "0", "-t", "1", stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = b""
        while (found := re.search(rb"http://[\d.]+:\d+", said)) is None:
            line_read = process.stdout.readline()
            assert line_read, said
            said += line_read
        assert b"without effect here: --jinja (always on)" in said
        with httpx.Client(base_url=found[0].decode(), timeout=PATIENCE) as client:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
            short, long = (
                client.post("/v1/chat/completions", json={**body, **more}).json()["usage"]
                for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}})
            )
        assert short["completion_tokens"] <= 6
        assert long["prompt_tokens"] > short["prompt_tokens"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    finally:
        process.kill()


def test_both_spellings_are_one_option(run: Command, target: Path, draft: Path) -> None:
    shared = ("-p", "hello", "--seed", "1", "-c", "64", "--json")
    ours = ("-m", target, "-md", draft, "-n", "4", "--temp", "0", "--stop", "zzz", "-ngl", "-1")
    theirs = ("--model", target, "--spec-draft-model", draft, "--predict", "4")
    theirs = (*theirs, "--temperature", "0", "-r", "zzz", "--n-gpu-layers", "all")
    first, second = (run(*given, *shared).document for given in (ours, theirs))
    assert first["settings"] == second["settings"]
    assert first["text"] == second["text"]


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, target: Path) -> Callable[..., None]:
    """Sets environment variables without their beginning; the target is one."""

    def give(**values: object) -> None:
        for name, value in {"MODEL": target, "N_PREDICT": 4, **values}.items():
            monkeypatch.setenv(f"LLAMA_ARG_{name}", str(value))

    return give


def test_variables_are_defaults(run: Command, variables: Callable[..., None]) -> None:
    variables(CTX_SIZE=64, REPACK="off", TOP_K=7, ROPE_SCALE=2, N_GPU_LAYERS="all")
    settings = run("-p", "hello", "--top-k", "5", "--json").document["settings"]
    assert settings["target"].endswith(".gguf")
    expected = {"n_ctx": 64, "max_tokens": 4, "repack": False, "rope_scale": 2.0}
    expected |= {"n_gpu_layers": -1, "top_k": 5}
    assert {name: settings[name] for name in expected} == expected


def test_variables_of_options_that_have_another_name_are_defaults(
    run: Command, variables: Callable[..., None], target: Path
) -> None:
    variables(MODEL="", HF_REPO=target, UBATCH=32, SPEC_TYPE="none")
    done = run("-p", "hello", "--json")
    settings = done.document["settings"]
    assert (settings["n_batch"], settings["drafter"]) == (32, "none")
    assert "without effect" not in done.err
    assert run("-p", "hello", "-ub", "16", "--json").document["settings"]["n_batch"] == 16


def test_variables_without_effect_are_named_in_one_line(
    run: Command, variables: Callable[..., None]
) -> None:
    variables(
        JINJA=1, MMPROJ_URL="a.gguf", PORT=80, NEW_ONE=1, CTX_SIZE="", TAGS="", SPLIT_MODE="none"
    )
    done = run("-p", "hello")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "without effect" in line]
    assert line == (
        "ggufspec: without effect here: LLAMA_ARG_SPLIT_MODE, LLAMA_ARG_MMPROJ_URL, "
        "LLAMA_ARG_NEW_ONE, LLAMA_ARG_PORT; LLAMA_ARG_JINJA (always on)"
    )


@pytest.mark.parametrize("name", sorted(each for each in READ if each.startswith("LLAMA_ARG_")))
def test_an_empty_variable_counts_as_unset(
    run: Command, variables: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables()
    monkeypatch.setenv(name, "")
    target = os.environ["LLAMA_ARG_MODEL"] or "none.gguf"
    with command_of("serve").make_context("serve", ["-m", target]) as context:
        empty = context.params
    monkeypatch.delenv(name)
    with command_of("serve").make_context("serve", ["-m", target]) as context:
        assert context.params == empty


def test_variables_of_a_draft_are_no_error_without_one(
    run: Command, variables: Callable[..., None]
) -> None:
    variables(N_GPU_LAYERS_DRAFT=3, SPEC_DRAFT_N_CPU_MOE=1)
    assert run("-p", "hello").code == 0
    failed = run("-p", "hello", "-ngld", "3")
    assert (failed.code, "needs a draft model" in failed.err) == (2, True)


def test_own_variable_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "theirs")
    (key,) = (each for each in command_of("serve").params if each.name == "api_key")
    assert key.value_from_envvar(click.Context(command_of("serve"))) == "theirs"
    monkeypatch.setenv("GGUFSPEC_API_KEY", "ours")
    assert key.value_from_envvar(click.Context(command_of("serve"))) == "ours"
