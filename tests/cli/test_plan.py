"""`ggufspec plan` as a user meets it: this machine or another, without loading anything."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import paper
import pytest
from click.testing import CliRunner, Result

from ggufspec.cli.main import cli
from ggufspec.engine.speeds import weights_note
from ggufspec.llama import rpc
from ggufspec.placement.speeds import Gpu, type_note


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("paper")
    target = paper.write(folder / "target.gguf", paper.LLAMA_3_70B)
    draft = paper.write(folder / "draft.gguf", paper.LLAMA_3_8B)
    return ["--target", str(target), "--draft", str(draft)]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=True)


def document(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_plans_for_another_machine(pair: list[str]) -> None:
    here = ("--vram", "24GiB", "--ram", "64GiB", "--gpu-bandwidth", "1008GB")
    result = invoke(*pair, *here)
    assert result.exit_code == 0, result.output
    for text in ("chosen", "no draft", "draft on GPU", "80 layers, 31 GB", "1008 GB/s", "-ngl "):
        assert text in result.output
    assert "…" not in result.output, "nothing is cut off at 80 columns"


def test_an_acceptance_that_was_not_given_is_called_assumed(pair: list[str]) -> None:
    there = (*pair, "--vram", "24GiB", "--ram", "64GiB")
    assumed = "acceptance: 80% of tokens, if those before were accepted; assumed (--acc"
    told = invoke(*there).output
    assert assumed in told
    assert f"The target's weights are {weights_note('Q3_K')}." in told
    given = invoke(*pair, "--vram", "99GiB", "-c", "0", "--acceptance", "0.8").output
    assert "accepted; assumed" not in given
    assert "The target's weights are" not in given, "none is on the CPU"
    assert "-c 8192" in given, "a context of 0 is what the target was trained for"


@pytest.mark.parametrize(
    ("type_", "is_ours", "told"),
    [
        ("Q4_K", False, "adds to a pass"),
        ("Q4_K", True, "with ggufspec's kernels, cost little more"),
        ("Q4_0", False, "tokens in a pass cost little more"),
    ],
)
def test_a_type_of_weights_is_described(type_: str, is_ours: bool, told: str) -> None:
    assert told in type_note(type_, is_ours=is_ours)


def test_what_is_printed_is_in_the_document(pair: list[str]) -> None:
    found = document(*pair, "--vram", "24GiB,12GiB", "--ram", "64GiB", "--acceptance", "0.7")
    chosen = found["plans"][0]
    assert chosen["way"] == "chosen"
    assert sum(chosen["split"]) == chosen["n_gpu_layers"]
    assert len(found["machine"]["gpus"]) == 2
    assert found["acceptance"] == 0.7
    assert found["target"]["n_layers"] == 80


def test_faster_memory_and_better_drafts_are_faster(pair: list[str]) -> None:
    def speed(*more: str) -> float:
        plans = document(*pair, "--vram", "24GiB", "--ram", "64GiB", *more)["plans"]
        return float(plans[0]["tokens_per_second"])

    usual = speed("--ram-bandwidth", "40GB")
    assert speed("--ram-bandwidth", "80GB") > 1.3 * usual
    assert speed("--ram-bandwidth", "40GB", "--acceptance", "0.95") > usual
    assert speed("--ram-bandwidth", "40GB", "--draft-n", "12") < usual, "too long"


def test_what_does_not_fit_is_reported(pair: list[str]) -> None:
    result = invoke(*pair, "--vram", "8GiB", "--ram", "8GiB")
    assert "too large" in result.output
    assert "None of these fits" in result.output
    result = invoke(*pair, "--vram", "8GiB", "--ram", "26GiB")
    assert "chosen: no draft" in result.output, "the target alone has room"
    assert "None of these fits" not in result.output


def test_a_plan_without_a_gpu(pair: list[str]) -> None:
    found = document(*pair, "--vram", "0", "--ram", "64GiB")["plans"]
    assert found[0]["n_gpu_layers"] == 0
    assert found[0]["split"] == []
    result = invoke(*pair, "--vram", "0", "--ram-bandwidth", "0.4GB")
    assert "0.4 GB/s" in result.output


def test_models_are_known_by_name_before_they_are_downloaded() -> None:
    found = document(
        "--target", "70b-q3_k_s", "--draft", "auto", "--vram", "24GiB", "--ram", "64GiB"
    )
    assert (found["target"]["name"], found["draft"]["name"]) == ("70B-Q3_K_S", "8B-Q3_K_L")
    assert found["plans"][0]["fits"]


def test_sizes_are_read_as_people_write_them() -> None:
    from ggufspec.cli.option_values import parse_bytes

    assert parse_bytes("24G") == parse_bytes(" 24 gib ") == 24 * 2**30
    assert parse_bytes("25.5GB") == 25_500_000_000
    assert parse_bytes("1000") == 1000


def test_a_plan_with_servers_names_them(pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    far = (Gpu("far:1", 20 * 2**30, is_remote=True), Gpu("far:2", 20 * 2**30, is_remote=True))
    servers = SimpleNamespace(gpus=lambda: far, close=lambda: None)
    monkeypatch.setattr(rpc, "RpcConnections", lambda addresses: servers)
    result = invoke(*pair, "--rpc", "far:1,far:2")
    assert result.exit_code == 0, result.output
    assert "far:2: 21 GB free, 400 GB/s assumed (--gpu-bandwidth)" in result.output
    assert "draft on GPU" not in result.output, "the draft stays here, and here is none"
    assert "-ngl 81 -ts 41,40 --rpc far:1,far:2 -c " in result.output


def test_a_draft_with_another_vocabulary_is_planned_with_a_note(pair: list[str]) -> None:
    result = invoke(*pair[:2], "--draft", "GPT-2-Q8_0", "--vram", "24GiB")
    assert result.exit_code == 0, result.output
    assert "128,256 tokens, the draft 50,257: it drafts only" in result.stderr
    assert "128,256" not in invoke(*pair, "--vram", "24GiB").stderr


def test_a_smaller_context_of_the_draft_takes_less_memory(pair: list[str]) -> None:
    there = (*pair, "--vram", "0", "--ram", "64GiB", "-c", "32768")
    whole, short = document(*there), document(*there, "-cd", "1024")
    n_saved = 31 * 1024 * 32 * 2 * 1024 * 2  # layers, keys and values in f16
    with_draft = [
        next(plan["host_bytes"] for plan in found["plans"] if plan["way"] != "no draft")
        for found in (whole, short)
    ]
    assert with_draft[0] - with_draft[1] >= n_saved


def test_experts_on_the_cpu_are_shown_with_their_pattern_and_options() -> None:
    result = invoke("--target", "Qwen3-30B-A3B-Q4_K_M", "--vram", "12GiB", "--ram", "64GiB")
    assert result.exit_code == 0, result.output
    matched = re.search(r"chosen +49/49 +experts of (\d+) ", result.output)
    assert matched, result.output
    assert f"-ngl 49 --n-cpu-moe {matched[1]} -c" in result.output
    assert rf"|{int(matched[1]) - 1})\.ffn_(up|down|gate|gate_up)_(ch|)exps" in result.output
    assert re.search(r"whole layers +\d+/49  ", result.output)
