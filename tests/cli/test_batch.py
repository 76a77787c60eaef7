"""`ggufspec batch` as users run it: killed, interrupted, resumed, with invalid input."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import ERROR, INTERRUPTED, USAGE, Command, started
from patience import PATIENCE, comes_true, is_alive

N = 10


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that never ends a text by itself."""
    path = tmp_path_factory.mktemp("models") / "talker.gguf"
    return tiny.write_llama(path, n_ctx_train=4096, chat_template=tiny.CHATML)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{i}", "prompt": f"hello {i}"}) for i in range(N)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def batch(command: Command, talker: Path, prompts: Path, tmp_path: Path) -> Command:
    """A batch of short texts, in this process but for its workers."""

    def call(*args: str | Path, file: Path = prompts, out: str | Path = "r.jsonl") -> Any:
        output = out if out == "-" else tmp_path / out
        given = ("-m", talker, "-t", "1", "-n", "8", "--draft-n", "auto", *args)
        return command("batch", file, "-o", output, *given)

    return call


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an output or a journal, but its first."""
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if b'"index"' in line[:10]]
    return [json.loads(line) for line in lines]


def begun(err: str) -> list[int]:
    return [int(number) - 1 for number in re.findall(r"begins prompt (\d+)", err)]


class Long:
    """A batch in a process group of its own, of texts that take some tenths of a second each."""

    def __init__(self, talker: Path, prompts: Path, output: Path, *args: str) -> None:
        given = ["-m", talker, "-t", "1", "-n", "120", "--drafter", "none", "-v", *args]
        given += ["--num-processes", "2", "-fa", "off"]
        self.output = output
        self.part = output.with_name(f"{output.name}.part")
        self.process = started("batch", prompts, "-o", output, *given, start_new_session=True)

    def __enter__(self) -> Long:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for(self, n_finished: int) -> None:
        def has_finished() -> bool:
            found = self.part.exists() and len(records(self.part)) >= n_finished
            assert found or self.process.poll() is None
            return found

        assert comes_true(has_finished)

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err.decode()

    def workers(self) -> set[int]:
        """The processes that it has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return set(map(int, path.read_text().split()))


@pytest.fixture
def long(talker: Path, prompts: Path, tmp_path: Path) -> Iterator[Callable[..., Long]]:
    """Starts them, and leaves none behind."""
    with ExitStack() as stack:
        yield lambda *args: stack.enter_context(Long(talker, prompts, tmp_path / "r.jsonl", *args))


linux = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks into /proc")


# What it writes


def test_records_come_in_the_order_of_the_prompts(batch: Command, tmp_path: Path) -> None:
    result = batch("--num-processes", "2", "-v", "-c", "5000")
    assert result.code == 0, result.err
    assert result.err.count("5,000 tokens exceeds the 4,096 that") == 1, "for both processes"
    assert result.out == ""
    found = records(tmp_path / "r.jsonl")
    assert [record["index"] for record in found] == list(range(N))
    assert [record["id"] for record in found] == [f"p{i}" for i in range(N)]
    assert all(record["n_generated"] == 8 for record in found)
    assert "10 of 10 prompts; 0 failed; 80 tokens" in result.err
    assert re.search(r"generated 80 tokens for 10 prompts in [\d.]+ s: [\d.]+ tokens/s", result.err)
    assert sorted(begun(result.err)) == list(range(N))
    assert not (tmp_path / "r.jsonl.part").exists()


def test_stdout_is_the_product(batch: Command, tmp_path: Path) -> None:
    result = batch("--limit", "3", out="-")
    assert [json.loads(line)["index"] for line in result.out.splitlines()] == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]
    into = batch("--limit", "1", out="/dev/null")
    assert (into.code, into.out) == (0, "")


def test_plain_text_and_the_turns_of_spec_bench(batch: Command, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("one\ntwo\n")
    assert batch("-n", "1", file=plain, out="plain.jsonl").code == 0
    assert len(records(tmp_path / "plain.jsonl")) == 2
    bench = tmp_path / "question.jsonl"
    bench.write_text('{"question_id": 81, "category": "writing", "turns": ["hello", "and?"]}\n')
    assert batch(file=bench, out="bench.jsonl").code == 0
    (record,) = records(tmp_path / "bench.jsonl")
    assert (record["question_id"], len(record["choices"][0]["turns"])) == (81, 2)


def test_failed_prompts_are_recorded_and_reported(batch: Command, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    lines = [{"prompt": "hello " * 200}, {"prompt": "hello"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = batch("-c", "64", file=file)
    assert result.code == ERROR
    assert "2 of 2 prompts; 1 failed (--resume --retry-failed tries them again)" in result.err
    assert "prompt 1 failed: the prompt has " in result.err
    found = records(tmp_path / "r.jsonl")
    assert [record["error"] is None for record in found] == [False, True]
    again = batch("-c", "64", "--resume", "-v", file=file)
    assert (again.code, begun(again.err)) == (ERROR, [])
    again = batch("-c", "64", "--resume", "--retry-failed", "-v", file=file)
    assert (again.code, begun(again.err)) == (ERROR, [0])


# Invalid input


def test_a_model_that_cannot_be_loaded_ends_it(batch: Command, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\1" * 500)
    result = batch("-m", broken, "--num-processes", "2")
    assert result.code == ERROR
    assert "broken.gguf" in result.err
    assert not list(tmp_path.glob("r.jsonl*")), "no file is left behind"


# Crashes


@linux
def test_kill_9_of_everything_loses_and_repeats_nothing(long: Callable[..., Long]) -> None:
    first = long()
    first.wait_for(2)
    workers = first.workers()
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()
    assert comes_true(lambda: not any(map(is_alive, workers)))
    kept = {record["index"]: record for record in records(first.part)}
    assert 2 <= len(kept) < N
    with first.part.open("ab") as torn:
        torn.write(b'{"index": 9, "text": "he')
    second = long("--resume")
    code, err = second.end()
    assert code == 0, err
    assert sorted(begun(err)) == [i for i in range(N) if i not in kept]
    found = records(first.output)
    assert [record["index"] for record in found] == list(range(N))
    assert all(found[i] == record for i, record in kept.items())
    assert not first.part.exists()


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_interrupted_it_keeps_what_is_finished(
    number: signal.Signals, long: Callable[..., Long]
) -> None:
    first = long()
    first.wait_for(2)
    workers = first.workers()
    assert first.process.pid not in map(os.getpgid, workers)  # Ctrl-C in a terminal spares them
    if number == signal.SIGINT:
        os.killpg(first.process.pid, number)  # as a terminal does
    else:
        first.process.send_signal(number)
    code, err = first.end()
    assert code == INTERRUPTED, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        "ggufspec: interrupted; the same command with --resume continues"
    )
    assert workers
    assert comes_true(lambda: not any(map(is_alive, workers)))
    assert 2 <= len(records(first.part)) < N


def test_a_resumed_batch_must_be_the_same(batch: Command, prompts: Path, tmp_path: Path) -> None:
    assert batch("--limit", "2").code == 0
    output = tmp_path / "r.jsonl"
    part = tmp_path / "r.jsonl.part"
    lines = output.read_bytes().splitlines(keepends=True)
    result = batch("--resume", "--temp", "0.5", "--limit", "2")
    assert (result.code, output.read_bytes()) == (USAGE, b"".join(lines))
    assert "complete, but has other" in result.err
    assert not part.exists()
