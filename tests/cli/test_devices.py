"""`ggufspec devices` lists what there is, in any build, and outlives a driver that crashes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import llama_cpp
import pytest
from cli.conftest import Command

from ggufspec.common import child
from ggufspec.llama import build, devices


def test_the_devices_and_the_build_are_listed(command: Command) -> None:
    done = command("devices")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["device", "type", "free", "total", "description"]
    assert any(line.startswith("CPU ") and devices.cpu_name() in line for line in lines)
    assert f"llama-cpp-python {llama_cpp.__version__}, built with " in done.out
    assert f"threads: {devices.n_threads_default()} by default" in done.out
    assert ("kept by ggufspec" in done.out) == (" OPENMP" not in done.out)
    assert ("no layers can be offloaded" in done.out) == (not devices.gpus())


def test_the_document_has_the_same(command: Command) -> None:
    document = command("devices", "--json").document
    (processor,) = (each for each in document["devices"] if each["type"] == "CPU")
    assert processor["description"]
    assert 0 < processor["n_free"] < processor["n_total"], "this process takes some"
    assert document["backends"]["CPU"] == 1
    assert document["versions"]["llama-cpp-python"] == llama_cpp.__version__


def test_nominal_bandwidths_are_a_column_where_they_are_known(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = command("devices", "--json").document
    card = {"name": "CUDA0", "description": "NVIDIA H200", "type": "GPU", "bandwidth": 4.8e12}
    found["devices"].append({**card, "n_free": 140_000_000_000, "n_total": 150_000_000_000})
    answer = b"a driver prints\n" + json.dumps(found).encode()
    done = subprocess.CompletedProcess([], 0, answer, b"a driver warns\x1b[2J\n")
    monkeypatch.setattr(child, "call", lambda *_: done)
    lines = command("devices").out.splitlines()
    assert lines[0].split() == ["device", "type", "free", "total", "nominal", "description"]
    (line,) = (line for line in lines if line.startswith("CUDA0 "))
    cells = [cell.strip() for cell in line.split("  ") if cell]
    assert cells == ["CUDA0", "GPU", "140 GB", "150 GB", "4800 GB/s", "NVIDIA H200"]
    assert any("a driver warns" in line for line in lines)


def test_what_the_build_does_not_use_of_the_processor_is_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = command("devices", "--json").document
    processor = found["processor"]
    assert (processor["build_command"] is None) == (processor["missing"] == [])
    assert {*processor["missing"]} <= {*processor["instruction_sets"], "OPENMP"}
    for facts, line in (
        (
            {"missing": ["AVX512", "AVX512_VNNI"]},
            "missing, though this processor has it: AVX512 AVX512_",
        ),
        ({"missing": [], "has_variants": True}, "CPU: the best of its libraries for this process"),
    ):
        answer = json.dumps({**found, "processor": {**processor, **facts}}).encode()
        done = subprocess.CompletedProcess([], 0, answer, b"")
        monkeypatch.setattr(child, "call", lambda *_, done=done: done)
        assert line in command("devices").out


def test_run_tells_once_of_a_build_that_is_slower_than_it_could_be(
    command: Command, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "of_processor", lambda: ["AVX1024"])
    errs = [command("run", "-t", "1", "-m", target, "-p", "a", "-n", "1").err for _ in range(2)]
    line = "ggufspec: llama.cpp does not use AVX1024 of this processor, and is slower"
    assert [line in err for err in errs] == [True, False]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "llama.cpp ended by Segmentation fault while"),
        ("os._exit(7)", "llama.cpp ended with code 7 while it looked for devices"),
    ],
)
def test_a_driver_that_crashes_ends_only_a_child_process(
    program: Command, code: str, text: str, tmp_path: Path
) -> None:
    lines = ("import os, signal, sys", "sys.stderr.write('MESA: bad card\\n')")
    (tmp_path / "llama_cpp.py").write_text("\n".join((*lines, "sys.stderr.flush()", code)))
    done = program("devices", PYTHONPATH=str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"ggufspec: {text}")
    assert "Update the driver; GGML_DISABLE_VULKAN=1 leaves out Vulkan" in done.err
    assert "MESA: bad card" in done.err
    assert "Traceback" not in done.err


def test_a_driver_that_hangs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SECONDS", 0.01)
    done = command("devices")
    assert done.code == 1
    assert "did not find its devices within 0.01 s: a GPU or its driver hangs" in done.err
