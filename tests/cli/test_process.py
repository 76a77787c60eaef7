"""What the command is to the system: a process with streams, signals, and an exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import tiny
from cli.conftest import (
    CLOSED_PIPE,
    ENTRY,
    ERROR,
    INTERRUPTED,
    MAIN,
    PREAMBLE,
    USAGE,
    Command,
    InterruptedStream,
    is_begun,
    started,
)
from patience import PATIENCE, at_most

from ggufspec import __main__ as entry

INTERRUPTED_MESSAGE = "ggufspec: interrupted"
ENDLESS = ("-p", "hi", "--temp", "0", "-c", "100000")  # more tokens than anybody waits for
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMILE = "héllo 🙂"


@pytest.fixture(scope="module")
def chatterbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the alphabet, over and over."""
    path = tmp_path_factory.mktemp("models") / "chatterbox.gguf"
    return tiny.write_scripted(path, tiny.SPM.spell(LETTERS), n_ctx_train=200_000)


@pytest.fixture(scope="module")
def smiley(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "smiley.gguf"
    return tiny.write_timed(path, [*tiny.SPM.spell(SMILE), 2], n_prompt=3)


def wait_for_context(process: subprocess.Popen[bytes]) -> None:
    """Return when a process that was started with -v has its model loaded and its context made."""
    assert process.stderr is not None
    with at_most():
        assert any(b"sched_reserve: reserve took" in line for line in process.stderr)
    time.sleep(0.3)


def no_trace(err: str) -> bool:
    return "Traceback" not in err and "Exception ignored" not in err


# The start


def test_help_comes_without_the_heavy_libraries() -> None:
    told = (
        "import sys; from ggufspec.cli import main\n"
        "heavy = {'llama_cpp', 'numpy', 'rich', 'gguf', 'jinja2', 'huggingface_hub', 'fastapi'}\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['ggufspec', *command.split()]\n"
        "    assert main.run() == 0\n"
        "    assert not heavy & {*sys.modules}, (command, heavy & {*sys.modules})\n"
    )
    names = ("", "run", "chat", "compare", "demo", "serve", "trim", "tune")
    process = started("--version", *(f"{name} --help" for name in names), code=told)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert out.count(b"Usage:") == len(names)
    assert err == b""


def test_it_runs_as_a_module_and_as_a_script(program: Command) -> None:
    result = program("--version")
    assert (result.code, result.err) == (0, "")
    assert version("ggufspec") in result.out
    (script,) = entry_points(group="console_scripts", name="ggufspec")
    assert script.load() is entry.main


# Ctrl-C


@pytest.mark.parametrize("module", ["ggufspec.cli.main", "ggufspec.cli.run"])
def test_ctrl_c_while_modules_are_imported(module: str, chatterbox: Path) -> None:
    at_an_import = PREAMBLE + (
        "import runpy, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "runpy.run_module('ggufspec', run_name='__main__')"
    )
    process = started("run", "-m", chatterbox, "-p", "hi", "-n", "5", code=at_an_import)
    out, err = (part.decode() for part in process.communicate(timeout=PATIENCE))
    assert (process.returncode, out) == (INTERRUPTED, "")
    assert err.split("\n") == ["", INTERRUPTED_MESSAGE, ""]


def test_ctrl_c_while_the_process_ends() -> None:
    at_the_end = "import atexit\natexit.register(lambda: signal.raise_signal(signal.SIGINT))\n"
    process = started("--version", code=PREAMBLE + at_the_end + ENTRY)
    out, err = (part.decode() for part in process.communicate(timeout=PATIENCE))
    assert (process.returncode, out) == (INTERRUPTED, f"ggufspec, version {version('ggufspec')}\n")
    assert err.split("\n") == ["", INTERRUPTED_MESSAGE, ""]


def test_ctrl_c_stays_ignored_in_the_background() -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    at_the_end = "import atexit; atexit.register(lambda: signal.raise_signal(signal.SIGINT))\n"
    process = started("--version", code=ignored + at_the_end + ENTRY)
    assert process.communicate(timeout=PATIENCE)[1] == b""
    assert process.returncode == 0


def test_ctrl_c_ends_a_text_with_what_there_is(chatterbox: Path) -> None:
    process = started("run", "-t", "1", "-m", chatterbox, "-md", chatterbox, *ENDLESS)
    assert process.stdout is not None
    begin = b""
    while len(begin) < 100 and (more := process.stdout.read(100)):
        begin += more
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=PATIENCE)
    text = (begin + rest).decode()
    assert process.returncode == INTERRUPTED, err
    assert text.endswith("\n")
    text = text.rstrip("\n")
    assert (LETTERS * (len(text) // len(LETTERS) + 1)).startswith(text)
    note = rb"(?:ggufspec: [^\n]+\n)*"
    told = re.fullmatch(note + rb"(\d+) tokens at [^\n]+\n" + note, err)
    assert told, f"one line, and notes where a busy machine was slow: {err!r}"
    n_unwritten = int(told[1]) - len(text)
    assert 0 <= n_unwritten <= 4, "at most the round that was being written"


def test_the_json_of_an_interrupted_text(
    run: Command, chatterbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.engine.engine.Stream", InterruptedStream)
    result = run("-m", chatterbox, "-p", "hi", "--json")
    document = result.document
    assert (result.code, document["finish_reason"]) == (INTERRUPTED, "interrupted")
    is_begun(document["text"])
    assert document["n_generated"] == len(document["text"])


def test_ctrl_c_ends_a_comparison_before_the_text(
    run: Command, chatterbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.engine.engine.Stream", InterruptedStream)
    result = run("-m", chatterbox, "-md", chatterbox, "-p", "hi", "--compare")
    assert (result.code, result.out) == (INTERRUPTED, "")
    assert result.err.split("\n") == ["", INTERRUPTED_MESSAGE, ""]


def test_ctrl_c_while_llama_cpp_logs(chatterbox: Path) -> None:
    """A signal that comes inside llama.cpp is heard at the next line of its log."""
    at_the_first_line = PREAMBLE + (
        "import logging\n"
        "class Press(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        logging.getLogger('ggufspec').removeHandler(self)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "logging.getLogger('ggufspec').addHandler(Press())\n"
        "logging.getLogger('ggufspec').setLevel(logging.DEBUG)\n"
        "from ggufspec.__main__ import main; main()"
    )
    process = started(
        "run", "-t", "1", "-m", chatterbox, "-p", "hi", "-n", "5", code=at_the_first_line
    )
    out, err = (part.decode() for part in process.communicate(timeout=PATIENCE))
    assert (process.returncode, out) == (INTERRUPTED, "")
    assert no_trace(err)
    assert INTERRUPTED_MESSAGE in err


def test_a_real_ctrl_c_while_a_long_prompt_is_read(chatterbox: Path) -> None:
    args = ("run", "-t", "1", "-m", chatterbox, "-c", "200000", "-f", "-", "-v")
    process = started(*args, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"0123456789" * 15_000)
    process.stdin.close()
    process.stdin = None
    wait_for_context(process)
    assert process.poll() is None, "the prompt must be long enough"
    process.send_signal(signal.SIGINT)
    out, err = (part.decode() for part in process.communicate(timeout=PATIENCE))
    assert (process.returncode, out.strip()) == (INTERRUPTED, "")
    assert err.splitlines()[-1] == INTERRUPTED_MESSAGE
    assert no_trace(err)


# The streams


def without_notice(err: bytes) -> str:
    """What was said, but for the line on instructions that this build of llama.cpp leaves out."""
    lines = err.decode().splitlines(keepends=True)
    return "".join(line for line in lines if "llama.cpp does not use" not in line)


def test_a_closed_pipe_ends_the_command_quietly(chatterbox: Path) -> None:
    process = started("run", "-t", "1", "-m", chatterbox, "-md", chatterbox, *ENDLESS)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == CLOSED_PIPE
    assert without_notice(process.stderr.read()) == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_reported() -> None:
    with open("/dev/full", "wb") as full:
        process = started("--help", stdout=full)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == ERROR
    assert (
        err == b"ggufspec: cannot write the output: no space left on that disk; make room there\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_cache_folder_on_a_full_disk_is_reported_once(chatterbox: Path, tmp_path: Path) -> None:
    limit = "from resource import RLIMIT_FSIZE, setrlimit; setrlimit(RLIMIT_FSIZE, (0, 0))\n"
    args = ("run", "-t", "1", "-m", chatterbox, "-md", chatterbox, "-p", "hi", "-n", "5")
    env = {**os.environ, "GGUFSPEC_CACHE": str(tmp_path)}
    process = started(*args, "--seed", "1", code=limit + MAIN, env=env)
    out, err = (part.decode() for part in process.communicate(timeout=PATIENCE))
    assert process.returncode == 0
    assert len(out) == 6
    assert err.count("measurements") == 1
    assert f"{tmp_path}/pairs: File too large" in err
    assert "set GGUFSPEC_CACHE to another folder" in err
    assert not any(tmp_path.glob("*/*"))


def test_letters_that_a_terminal_lacks_are_replaced(program: Command, smiley: Path) -> None:
    args = ("run", "-t", "1", "-m", smiley, "-md", smiley, "-p", "hi")
    result = program(*args, PYTHONIOENCODING="ascii")
    assert (result.code, result.out) == (0, "h?llo ?\n")
    result = program(*args, "--json", PYTHONIOENCODING="latin-1")
    assert (result.code, result.document["text"]) == (0, SMILE), "JSON is UTF-8 everywhere"


def test_a_prompt_of_any_letters_arrives_in_the_c_locale(
    program: Command, command: Command, target: Path
) -> None:
    args = ("run", "-t", "1", "-m", target, "-p", "日本 🙂", "-n", "5", "--temp", "0", "--json")
    result = program(*args, LC_ALL="C")
    assert result.code == 0
    assert result.document["tokens"] == command(*args).document["tokens"]


@pytest.mark.skipif(os.name != "posix", reason="closes streams by a POSIX shell")
@pytest.mark.parametrize(
    ("closed", "args", "code"),
    [
        ("<&-", [], ERROR),
        (">&-", ["-p", "hi"], ERROR),
        ("2>&-", ["-p", "hi"], 0),
    ],
)
def test_a_stream_may_be_closed(closed: str, args: list[str], code: int, smiley: Path) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "ggufspec"]
    done = subprocess.run(
        [*shell, "run", "-t", "1", "-m", smiley, *args], capture_output=True, timeout=PATIENCE
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, err
    assert no_trace(err)
    assert out == ("" if code else f"{SMILE}\n")
    if code:
        assert ("the prompt is empty" if closed == "<&-" else "stdout is closed") in err


def test_a_compilation_that_took_too_long_does_not_crash_the_end() -> None:
    part = {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(40)}}
    parts = {f"p{i}": part for i in range(100)}  # some time to find the part that is refused
    schema = json.dumps({"properties": {**parts, "last": {"not": {"const": 1}}}})
    code = "from ggufspec.structured import grammar; grammar.MAX_SECONDS = 0.02\n" + MAIN
    process = started("run", "-m", "nowhere.gguf", "-p", "x", "-j", schema, code=code)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == USAGE, err
    assert b"takes longer than 0.02 s to compile; simplify it" in err


@pytest.mark.skipif(os.name != "posix", reason="there are no pseudo-terminals")
def test_no_control_character_of_a_model_or_a_file_reaches_a_terminal(
    command: Command, tmp_path: Path
) -> None:
    title = "\x1b]0;owned\x07"
    model = tiny.write_scripted(tmp_path / "model.gguf", tiny.SPM.spell(f"a{title}b"))
    args = ["run", "-m", str(model), "-p", "hi", "-n", "12", "--temp", "0", "-t", "1"]
    assert f"a{title}b" in command(*args).out, "not to a terminal"
    parent, child = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *args], stdout=child, stderr=subprocess.PIPE, check=False
    )
    os.close(child)
    written = os.read(parent, 10_000)
    os.close(parent)
    assert rb"a\x1b]0;owned\x07b" in written, done.stderr
    assert b"\x1b]" not in written
    args[args.index(str(model))] = f"no{title}file.gguf"
    for err in (command(*args, "--temp", f"x{title}").err, command(*args).err):
        assert r"\x1b]0;owned" in err
        assert "\x1b" not in err
