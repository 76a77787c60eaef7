"""Kernels that would end the process are not used; everything else stays as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from processes import python
from small import small

from ggufspec import standin
from ggufspec.common import child
from ggufspec.drafting import profile_store
from ggufspec.llama import kernels
from ggufspec.models.quantization import header_of

BUILD = llama_cpp.llama_print_system_info().decode()
with_amx = pytest.mark.skipif("AMX_INT8 = 1" not in BUILD, reason="llama.cpp has no AMX here")
with_repack = pytest.mark.skipif("REPACK = 1" not in BUILD, reason="llama.cpp repacks nothing here")
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="the interpreters are shell scripts")

LOAD = """
    import logging, sys
    import numpy as np
    from ggufspec.llama import kernels
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    {first}
    from ggufspec.llama.context import Context
    from ggufspec.llama.context_options import ContextOptions
    from ggufspec.llama.model import Model
    model = Model(sys.argv[1])
    context = Context(model, ContextOptions(n_ctx=64, n_rows=8, n_threads=2))
    context.decode([*range(300, 308)], 8)
    np.save(sys.argv[1] + ".npy", context.rows(0, 8))
"""


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    standin.write(standin.plan(header_of("small", small(), "Q4_0"), 1.0), path)
    return path


def loaded(model: Path, first: str = "") -> list[str]:
    """The lines printed by a process that loads a model and makes a pass over eight tokens."""
    return python(LOAD.format(first=first), args=(model,))


@with_repack
def test_what_is_left_out_is_used_by_no_model(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown with kernels that most processors have: they are in the same list."""
    monkeypatch.setenv(kernels.AMX_VARIABLE, "off")
    monkeypatch.setenv(kernels.VARIABLE, "off")  # they come before those of llama.cpp
    usual = loaded(quantized)
    if not any("REPACK model buffer" in line for line in usual):
        pytest.skip("llama.cpp repacks no Q4_0 on this processor")
    logits = np.load(f"{quantized}.npy")
    without = loaded(quantized, "kernels.leave_out('CPU_REPACK')")
    assert not any("REPACK model buffer" in line for line in without)
    assert np.abs(np.load(f"{quantized}.npy") - logits).max() < 0.2 * logits.std()


@with_amx
def test_a_process_survives_its_first_pass(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial is made once; later processes use what it found."""
    monkeypatch.delenv(kernels.AMX_VARIABLE)
    first = loaded(quantized)
    (found,) = [record for record in profile_store.records() if record.facts["about"] == "AMX"]
    works = found.document["works"]
    assert any("AMX model buffer" in line for line in first) is works
    assert any("do not work" in line for line in first) is not works
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert kernels.amx_works() is works, "another trial would fail"


def interpreter(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@on_posix
@pytest.mark.parametrize(
    "script",
    [None, "sleep 60", "kill -9 $$", "exit 0"],
    ids=["no interpreter", "timeout", "out of memory", "no answer"],
)
def test_a_trial_without_an_answer_is_made_again(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(kernels.AMX_VARIABLE)
    monkeypatch.setattr(child, "SECONDS", 0.5)
    executable = interpreter(tmp_path, script) if script else str(tmp_path / "none")
    monkeypatch.setattr(sys, "executable", executable)
    assert not kernels.amx_works(), "the safe kernels are used meanwhile"
    assert not [*profile_store.records()]
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "echo works"))
    monkeypatch.setattr(child, "SECONDS", 60.0)
    assert kernels.amx_works()
    (found,) = profile_store.records()
    assert found.document == {"works": True}


@on_posix
@pytest.mark.parametrize("script", ["kill -SEGV $$", "echo wrong"])
def test_a_definite_failure_is_remembered(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(kernels.AMX_VARIABLE)
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, script))
    assert not kernels.amx_works()
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "echo works"))
    assert not kernels.amx_works()
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert message.startswith("ggufspec: the AMX kernels")
        assert "tried once, remembered" in message
    (found,) = profile_store.records()
    assert found.document == {"works": False}
