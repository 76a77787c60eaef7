"""Kernels that would end the process are not used; everything else stays as it was."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import llama_cpp
import pytest
from small import small

from ggufspec import standin
from ggufspec.drafting import profile_store
from ggufspec.llama import amx

BUILD = llama_cpp.llama_print_system_info().decode()
with_amx = pytest.mark.skipif("AMX_INT8 = 1" not in BUILD, reason="llama.cpp has no AMX here")
with_repack = pytest.mark.skipif("REPACK = 1" not in BUILD, reason="llama.cpp repacks nothing here")

LOAD = """
    import logging, sys
    from ggufspec.llama import amx
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    {first}
    from ggufspec.llama.context import Context, ContextOptions
    from ggufspec.llama.model import Model
    model = Model(sys.argv[1])
    context = Context(model, ContextOptions(n_ctx=64, n_rows=8, n_threads=2))
    context.decode([*range(300, 308)], 8)
    print("wrote", context.rows(0, 8).argmax(axis=1).tolist())
"""


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    standin.write(standin.plan(standin.source_from_dimensions("small", small(), "Q4_0"), 1.0), path)
    return path


def loaded(model: Path, first: str = "") -> list[str]:
    """What a process says that loads a model and makes a pass over eight tokens."""
    program = textwrap.dedent(LOAD).format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-800:]}{done.stderr[-800:]}"
    return done.stdout.splitlines()


@with_repack
def test_what_is_left_out_is_used_by_no_model(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown with kernels that most processors have: they stand in the same list of ggml's."""
    monkeypatch.setenv(amx.VARIABLE, "off")
    usual = loaded(quantized)
    if not any("REPACK model buffer" in line for line in usual):
        pytest.skip("llama.cpp repacks no Q4_0 on this processor")
    without = loaded(
        quantized,
        "amx.leave_out_if_broken(); amx.leave_out_if_broken.cache_clear(); "
        "amx._NAME = b'CPU_REPACK'",
    )
    assert not any("REPACK model buffer" in line for line in without)
    assert any("do not work" in line for line in without), "it is told"
    assert without[-1] == usual[-1]
    assert usual[-1].startswith("wrote [")


@with_amx
def test_a_process_survives_its_first_pass(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody said whether AMX works: it is found out once, and kept for later processes."""
    monkeypatch.delenv(amx.VARIABLE)
    first = loaded(quantized)
    (found,) = [record for record in profile_store.records() if record.facts["about"] == "AMX"]
    works = found.document["works"]
    assert any("AMX model buffer" in line for line in first) is works
    assert any("do not work" in line for line in first) is not works
    monkeypatch.setattr("subprocess.run", None)
    assert amx._works() is works, "another trial would fail"


@with_amx
def test_the_user_has_the_last_word(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(amx.VARIABLE, "off")
    assert not any("AMX model buffer" in line for line in loaded(quantized))


@with_amx
def test_a_trial_that_cannot_be_made_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(amx.VARIABLE)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert amx._works() is False
