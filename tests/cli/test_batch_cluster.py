"""`ggufspec batch --cluster` as people run it: refused, interrupted, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from cli.conftest import ERROR, INTERRUPTED, USAGE, Command, started
from patience import PATIENCE, comes_true

MARK = "GGUFSPEC_TEST_OF"  # in the environment of all that a test has started

linux = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that never ends a text by itself."""
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "talker.gguf", n_ctx_train=4096)


@pytest.fixture
def given(talker: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"hello {i}"}) for i in range(6)))
    output = tmp_path / "r.jsonl"
    settings = ["-m", talker, "-o", output, "-t", "1", "-n", "8", "--drafter", "none"]
    settings += ["-fa", "off"]  # times choose it otherwise, beside other programs not always alike
    return ["batch", str(prompts), *map(str, settings)]


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def family(mark: str) -> set[int]:
    """All processes with the mark, except zombies."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_dead = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes() and not is_dead:
                found.add(int(path.name))
        except OSError:
            continue
    return found


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kills all processes that have it at the end."""
    name = f"{os.getpid()}-{request.node.name}"
    yield name
    for pid in family(name):
        os.kill(pid, signal.SIGKILL)


def start(mark: str, *args: str) -> subprocess.Popen[bytes]:
    return started(*args, start_new_session=True, env={**os.environ, MARK: mark})


def wait_for(process: subprocess.Popen[bytes], what: bytes) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if what in line:
            return
    raise AssertionError(f"it never said {what!r}")


@linux
def test_a_local_ray_ends_with_its_batch_which_resumes_without_it(
    given: list[str], command: Command, tmp_path: Path, mark: str
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    output = tmp_path / "r.jsonl"
    given += ["-n", "400", "-v"]
    assert command(*given).code == 0
    alone = texts(output)
    output.unlink()
    process = start(mark, *given, "--num-processes", "2", "--cluster")
    wait_for(process, b"begins prompt 3")
    assert len(family(mark)) > 5
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (INTERRUPTED, b""), err.decode()
    assert b"Traceback" not in err
    assert err.endswith(b"ggufspec: interrupted; the same command with --resume continues\n")
    assert comes_true(lambda: not family(mark)), f"left behind: {family(mark)}"
    n_kept = output.with_name("r.jsonl.part").read_bytes().count(b'{"index"')
    assert 1 <= n_kept < 6
    result = command(*given, "--resume")
    assert result.code == 0, result.err
    assert result.err.count("begins prompt") == 6 - n_kept
    assert texts(output) == alone


def test_what_is_refused(given: list[str], command: Command, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    for args, code, said in [
        (["--cluster", "127.0.0.1:1"], ERROR, "cannot use a Ray cluster at 127.0.0.1:1"),
        (
            ["--cluster", "prompts.jsonl"],
            USAGE,
            "'prompts.jsonl' is not an address of a Ray cluster",
        ),
        (["--cluster-gpus", "1"], USAGE, "--cluster-gpus needs --cluster"),
    ]:
        result = command(*given, *args)
        assert (result.code, result.out) == (code, ""), result.err
        assert said in result.err
        assert "Traceback" not in result.err
    assert not list(tmp_path.glob("r.jsonl*")), "no file is left behind"
