"""`ggufspec devices` lists the device; without it everything runs on the CPU, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ggufspec.llama import build
from ggufspec.llama.devices import Device
from ggufspec.standin.embedded import embedded_draft, embedded_target

PAIR = ("-m", str(embedded_target()), "-md", str(embedded_draft()))
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "VK_DRIVER_FILES": os.devnull}


def ggufspec(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ggufspec", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_device_is_listed_with_its_memory(device: Device) -> None:
    document = json.loads(ggufspec("devices", "--json").stdout)
    (found,) = (each for each in document["devices"] if each["name"] == device.name)
    assert found["description"] == device.description
    assert found["type"] in ("GPU", "integrated GPU")
    assert 0 < found["n_free"] <= found["n_total"]
    assert not any("no layers can be offloaded" in line for line in document["advice"])
    assert device.name in ggufspec("devices").stdout


def test_what_llama_cpp_logs_about_devices_is_not_on_stderr() -> None:
    done = ggufspec("run", *PAIR, "-ngl", "0", "-ngld", "0", "-p", "Once", "-n", "2")
    assert "ggml" not in done.stderr


@pytest.mark.skipif(
    not {"CUDA", "Vulkan"} & build.backends().keys(), reason="no variable hides its devices"
)
def test_a_build_whose_device_is_gone_works_on_the_cpu_and_says_so(tmp_path: Path) -> None:
    advice = json.loads(ggufspec("devices", "--json", **HIDDEN).stdout)["advice"]
    assert "it found no device: no layers can be offloaded" in advice[0]
    assert " may hide it" in advice[0]
    run = ggufspec("run", *PAIR, "-ngl", "99", "-p", "Once", "-n", "4", **HIDDEN)
    assert "no layers were offloaded: llama.cpp's " in run.stderr
    assert "-ngl 0" in ggufspec("plan", *PAIR, **HIDDEN).stdout
    report = tmp_path / "report.json"
    bench = ("bench", *PAIR, "--runs", "1", "-n", "4", "-ngl", "-1", "--json", str(report))
    assert "no layers were offloaded: " in ggufspec(*bench, **HIDDEN).stderr
