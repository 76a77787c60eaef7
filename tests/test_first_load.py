"""The first load of a pair as users have it: kernels are tried, passes are measured and stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from full_disk import contents
from patience import PATIENCE
from small import small

from ggufspec import standin
from ggufspec.drafting import profile_store
from ggufspec.llama import kernels
from ggufspec.models.quantization import header_of

WRITE = """
import json, logging, sys
import ggufspec
from ggufspec.drafting import profile_store

def write():
    with ggufspec.load(*sys.argv[1:], n_ctx=256) as engine:
        text = engine.generate("hello", max_tokens=8, seed=1, ignore_eos=True)
        print(json.dumps([len(text.tokens), [engine.kernels, engine.attention], engine.notes]))

logging.basicConfig(format="%(message)s")
"""
# As another version of ggufspec might have stored documents; a trial of kernels is read strictly.
OTHER_FORMS = """
known = [each for each in profile_store.records() if each.facts.get("about") != "kernels"]
for value in (None, "x", [[5]]):
    for each in known:
        profile_store.remember(each.facts, dict.fromkeys(each.document, value))
    write()
"""
MEASURES = "to measure which are faster; this happens once"
# Where the extension has kernels for this processor, which of them are faster is measured.
N_MEASURED = 2 if kernels.unusable() is None else 0
MOST_LOADS = 15
DAMAGES: tuple[bytes, ...] = (b"", b"{", b"[]\n", b"\xff" * 1000)


class Loaded(NamedTuple):
    """What a process has printed for each load of the pair and text."""

    texts: list[list[Any]]  # number of tokens, choice of kernels and attention, notes
    n_measured: int  # models that were loaded with both kernels


def start(pair: list[Path], cache: Path, program: str = "write()") -> subprocess.Popen[str]:
    """A process that loads the pair, without the settings of this test suite."""
    env = {**os.environ, "GGUFSPEC_CACHE": str(cache)}
    for name in (kernels.VARIABLE, kernels.AMX_VARIABLE):
        env.pop(name, None)
    command = [sys.executable, "-c", WRITE + program, *pair]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **streams)


def ended(process: subprocess.Popen[str]) -> Loaded:
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in err) == (0, False), err
    return Loaded([*map(json.loads, out.splitlines())], err.count(MEASURES))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and a draft of random weights."""
    folder = tmp_path_factory.mktemp("models")
    files = [folder / "target.gguf", folder / "draft.gguf"]
    for path, n_layers in zip(files, (3, 1), strict=True):
        source = header_of("small", small(n_layers=n_layers), "Q4_0")
        standin.write(standin.plan(source, 1.0), path)
    return files


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, pair: list[Path]) -> Path:
    """What was stored since two processes were started at once, when there was no folder yet."""
    folder = tmp_path_factory.mktemp("home") / "new" / "cache"
    first = [ended(process) for process in [start(pair, folder) for _ in range(2)]]
    for (n_tokens, _, notes), *_ in (each.texts for each in first):
        assert (n_tokens, notes) == (8, [])
    assert sum(each.n_measured for each in first) >= N_MEASURED
    for _ in range(MOST_LOADS):  # other programs disturb measurements, which the next load repeats
        if ended(start(pair, folder)).n_measured == 0:
            return folder
    pytest.skip(f"other programs disturbed a measurement in each of {MOST_LOADS} loads")


def test_later_loads_read_what_the_first_ones_stored(
    pair: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that had to wait for another process that measures."""
    monkeypatch.setenv("GGUFSPEC_CACHE", str(cache))
    stored = {f"pairs/{each.key}.json" for each in profile_store.records()}
    assert stored == contents(cache).keys() - {"measuring.lock", "records.lock"}
    later = ended(start(pair, cache))
    assert later.n_measured == 0
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path))
    with profile_store.measuring(lambda: pytest.fail("nobody else measures")):
        process = start(pair, tmp_path)
        assert process.stderr is not None
        assert any("another process measures" in line for line in process.stderr)
        shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    assert ended(process) == later


def test_what_cannot_be_used_is_measured_again(
    pair: list[Path], cache: Path, tmp_path: Path
) -> None:
    for i, (name, data) in enumerate(contents(cache).items()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(DAMAGES[i % len(DAMAGES)] or data[: len(data) // 2])
    found = ended(start(pair, tmp_path))
    assert (found.n_measured, found.texts[0][2]) == (N_MEASURED, [])
    found = ended(start(pair, tmp_path, OTHER_FORMS))
    assert [text[0] for text in found.texts] == [8, 8, 8]
