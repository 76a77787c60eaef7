"""The first load of a pair as users have it: kernels are tried, passes are measured and stored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
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

PROGRAM = """
import json, logging, sys
from time import perf_counter
import ggufspec

logging.basicConfig(format="%(message)s")

began = perf_counter()
with ggufspec.load(*sys.argv[1:], n_ctx=256) as engine:
    seconds = perf_counter() - began
    text = engine.generate("hello", max_tokens=8, seed=1, ignore_eos=True)
    chosen = [engine.kernels, engine.attention]
    print(json.dumps([seconds, len(text.tokens), chosen, engine.notes]))
"""
OTHER_FORMS = """
import sys
import ggufspec
from ggufspec.drafting import profile_store
from ggufspec.llama import kernels

known = [*profile_store.records()]
trials = [each for each in known if each.facts.get("about") == "kernels"]
for value in (None, 5, "x", [[5]], {"1": "x"}):
    for each in known:
        if each not in trials:
            profile_store.remember(each.facts, dict.fromkeys(each.document, value))
    with ggufspec.load(*sys.argv[1:], n_ctx=256) as engine:
        print(len(engine.generate("hello", max_tokens=8, seed=1, ignore_eos=True).tokens))
    for trial in trials:
        kernels.status.cache_clear()
        profile_store.remember(trial.facts, {**trial.document, "words": value})
        assert not kernels.status().types
        kernels.status.cache_clear()
        profile_store.remember(trial.facts, trial.document)
"""
MEASURES = "to measure which are faster; this happens once"
# Where the extension has kernels for this processor, which of them are faster is measured.
N_MEASURED = 2 if kernels.unusable() is None else 0
_MOST_LOADS = 15
DAMAGES: tuple[bytes, ...] = (b"", b"{", b"[]\n", b"\xff" * 1000)


@dataclass(frozen=True)
class Loaded:
    """What a process has printed that has loaded the pair and written a text."""

    seconds: float  # of the load
    n_tokens: int
    chosen: list[Any]  # kernels, attention
    notes: list[str]
    n_measured: int  # models that were loaded with both kernels

    @classmethod
    def by(cls, process: subprocess.Popen[str]) -> Loaded:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        return cls(*json.loads(out), err.count(MEASURES))


@dataclass(frozen=True)
class Pair:
    """A target and a draft of random weights."""

    files: tuple[Path, Path]

    def start(self, cache: Path, program: str = PROGRAM) -> subprocess.Popen[str]:
        """A process that loads it, without the settings of this test suite."""
        env = {**os.environ, "GGUFSPEC_CACHE": str(cache)}
        for name in (kernels.VARIABLE, kernels.AMX_VARIABLE):
            env.pop(name, None)
        return subprocess.Popen(
            [sys.executable, "-c", program, *self.files],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def load(self, cache: Path) -> Loaded:
        return Loaded.by(self.start(cache))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    files = folder / "target.gguf", folder / "draft.gguf"
    for path, n_layers in zip(files, (3, 1), strict=True):
        source = header_of("small", small(n_layers=n_layers), "Q4_0")
        standin.write(standin.plan(source, 1.0), path)
    return Pair(files)


class Settled(NamedTuple):
    """A cache folder in which all is stored, and the last of the loads that stored it."""

    cache: Path
    last: Loaded


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Settled:
    """After two processes have started at once, when the folder did not exist yet."""
    cache = tmp_path_factory.mktemp("home") / "new" / "cache"
    processes = [pair.start(cache) for _ in range(2)]
    first = [Loaded.by(process) for process in processes]
    assert [(each.n_tokens, each.notes) for each in first] == [(8, [])] * 2
    assert sum(each.n_measured for each in first) >= N_MEASURED
    known = records(cache)
    assert known
    for _ in range(_MOST_LOADS):
        last = pair.load(cache)
        before, known = known, records(cache)
        if last.n_measured == 0 and before.keys() == known.keys():
            return Settled(cache, last)
        # Other programs had disturbed a measurement, which is then repeated by the next load.
    pytest.skip(f"other programs disturbed a measurement in each of {_MOST_LOADS} loads")


def records(cache: Path) -> dict[str, dict[str, Any]]:
    """The stored documents by the names of their files; each file has to be a valid one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGUFSPEC_CACHE", str(cache))
        found = {f"pairs/{each.key}.json": each.document for each in profile_store.records()}
    assert found.keys() == contents(cache).keys() - {"measuring.lock"}
    return found


def test_what_two_first_processes_stored_is_read_by_later_ones(
    pair: Pair, settled: Settled
) -> None:
    found = pair.load(settled.cache)
    assert (found.chosen, found.n_tokens, found.notes) == (settled.last.chosen, 8, [])
    assert found.n_measured == 0


def test_a_process_waits_for_another_one_that_measures(
    pair: Pair, settled: Settled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path))
    with profile_store.measuring(lambda: pytest.fail("nobody else measures")):
        process = pair.start(tmp_path)
        assert process.stderr is not None
        assert any("another process measures" in line for line in process.stderr)
        shutil.copytree(settled.cache, tmp_path, dirs_exist_ok=True)
    found = Loaded.by(process)
    assert found.n_measured == 0
    assert found.chosen[0] == settled.last.chosen[0]


def test_a_cache_that_cannot_be_written_is_told_once(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = pair.load(tmp_path / "file" / "cache")
    assert found.n_tokens == 8
    (note,) = found.notes
    assert f"measurements cannot be stored in {tmp_path}/file/cache/pairs: Not a directory" in note
    assert "set GGUFSPEC_CACHE to another folder" in note


def test_damaged_files_are_measured_again_and_replaced(
    pair: Pair, settled: Settled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, (name, data) in enumerate(contents(settled.cache).items()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(DAMAGES[i % len(DAMAGES)] or data[: len(data) // 2])
    found = pair.load(tmp_path)
    assert (found.n_tokens, found.notes) == (8, [])
    assert found.n_measured == N_MEASURED
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path))
    assert [*profile_store.records()], "what other programs have not disturbed"


def test_documents_of_another_form_are_measured_again(
    pair: Pair, settled: Settled, tmp_path: Path
) -> None:
    """As another version of ggufspec might have stored them."""
    shutil.copytree(settled.cache, tmp_path / "cache")
    process = pair.start(tmp_path / "cache", OTHER_FORMS)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.split()) == (0, ["8"] * 5), err
