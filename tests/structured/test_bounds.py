"""What is too large or too complex is an error, never a crash or a stall."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from llguidance import LLParserLimits
from patience import PATIENCE, child_seconds

from ggufspec.common.child import LimitedProcess, LimitExceededError
from ggufspec.errors import DecodeError, GgufspecError, OptionError
from ggufspec.structured import grammar, limits
from ggufspec.structured.constraint import GrammarConstraint, TokenTable

MAX_SECONDS = 5.0  # of processor time; the slowest takes 1.3
END = 256


def nested(n: int) -> str:
    return '{"items": ' * n + "{}" + "}" * n


def properties(n: int) -> dict[str, object]:
    return {"properties": {f"p{i}": {"type": "string"} for i in range(n)}}


REFS = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
        "d3000": {"type": "boolean"},
    },
}

SOME = ""  # any complaint, or none
# By name: what makes the grammar, its source, and the complaint.
CASES: dict[str, tuple[Callable[[str], str], str, str]] = {
    "nested 100000": (grammar.of_json_schema, nested(100_000), "it may have 131,072"),
    "nested 8000": (grammar.of_json_schema, nested(8_000), "nested too deeply"),
    "nested 900": (grammar.of_json_schema, nested(900), "nested too deeply"),
    "stalling pattern": (
        grammar.of_json_schema,
        json.dumps({"type": "string", "pattern": "(a|a)*" * 6000}),
        "too complex|longer than",
    ),
    "references": (grammar.of_json_schema, json.dumps(REFS), "^$"),
    "1000 optional": (grammar.of_json_schema, json.dumps(properties(1_000)), "^$"),
    "3000 optional": (grammar.of_json_schema, json.dumps(properties(3_000)), SOME),
    "all of anyOf": (
        grammar.of_json_schema,
        json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(30)]}),
        SOME,
    ),
    "many items": (
        grammar.of_json_schema,
        json.dumps({"type": "array", "minItems": 10**6, "maxItems": 10**12}),
        "^$",
    ),
    "too long string": (
        grammar.of_json_schema,
        json.dumps({"type": "string", "maxLength": 10**12}),
        SOME,
    ),
    "5000 digits": (
        grammar.of_json_schema,
        '{"type": "integer", "maximum": 1' + "0" * 5000 + "}",
        SOME,
    ),
    "error among 300": (
        grammar.of_json_schema,
        json.dumps({"anyOf": [{}] * 300 + [{"not": {"const": 1}}]}),
        "at #/anyOf/300: .not. cannot be guaranteed",
    ),
    "brackets": (grammar.of_grammar, "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, SOME),
    "Lark brackets": (grammar.of_grammar, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000, SOME),
    "alternatives": (
        grammar.of_grammar,
        "root ::= " + " | ".join(f'"abc{i}"' for i in range(9_000)),
        "^$",
    ),
    "many rules": (
        grammar.of_grammar,
        "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(4_000)),
        "4,000 rules; it may have 1,000",
    ),
    "terminals": (
        grammar.of_grammar,
        "start: R0\n" + "\n".join(f'R{i}: "a" R{i + 1} "b"' for i in range(5000)),
        SOME,
    ),
    "doubled rules": (
        grammar.of_grammar,
        "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
        + '\nr40: "x" | ""',
        SOME,
    ),
    "ambiguous": (
        grammar.of_grammar,
        'start: s\ns: s s s s | "a" | "b" s | /[a-z]+/ | /[a-z]/ s',
        SOME,
    ),
    "stalling": (grammar.of_regex, "(a|a)*" * 6000, "too complex|longer than"),
    "repetition": (grammar.of_regex, "(((a{100}){100}){100}){100}", SOME),
    "window": (grammar.of_regex, ".*a.{100}", SOME),
    "words": (
        grammar.of_regex,
        "(" + "|".join(f"word{i * 7919}" for i in range(9000)) + ")*",
        "^$",
    ),
}


def byte_table() -> TokenTable:
    return TokenTable(
        [bytes([byte]) for byte in range(256)] + [b"<end>", b"aaa", b"abab", b'{"p1'],
        special=[END],
        stop_tokens=[END],
        tokenize=lambda before, text: list(text),
    )


def try_each() -> None:
    """Reads names; prints each complaint, and the processor time: in a process of its own."""
    table = byte_table()
    (process,) = (each for each in vars(grammar).values() if isinstance(each, LimitedProcess))

    def tell(what: str | float) -> None:
        sys.stdout.write(f"{json.dumps(what)}\n")
        sys.stdout.flush()

    def work(make: Callable[[str], str], source: str, _: str) -> None:
        complaint = ""
        try:
            constraint = GrammarConstraint(table, make(source), 0)
            tokens: list[int] = []
            for _ in range(5):
                allowed = constraint.masks(tokens)[0]
                constraint.forced(tokens)
                possible = [i for i in range(260) if allowed[i // 32] >> i % 32 & 1]
                if not possible or possible[0] == END:
                    break
                tokens.append(possible[0])
        except GgufspecError as error:
            complaint = str(error)
        process.close()  # for what it has used to count
        tell(complaint)

    threading.stack_size(512 * 1024)
    for line in sys.stdin:
        child = os.fork()  # of its own, because what is given up goes on for a while
        if child == 0:
            thread = threading.Thread(target=work, args=CASES[line.strip()])
            thread.start()
            thread.join()
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status:
            tell(f"panic: ended with {status}")
        tell(used.ru_utime + used.ru_stime)


@pytest.fixture(scope="module")
def tried() -> Iterator[Callable[[str], tuple[float, str]]]:
    """Tries a case when it is asked for, so that no process of parallel tests tries them all."""
    code = f"import sys; sys.path = {sys.path}; from structured.test_bounds import try_each; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}try_each()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def ask(name: str) -> tuple[float, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        complaint = json.loads(process.stdout.readline())
        return json.loads(process.stdout.readline()), complaint

    yield ask
    _, printed = process.communicate(timeout=PATIENCE)
    assert printed == ""
    assert process.returncode == 0


@pytest.mark.parametrize("name", CASES)
def test_nothing_stalls_or_crashes(name: str, tried: Callable[[str], tuple[float, str]]) -> None:
    """On a thread with little stack, and without anything that a library prints."""
    seconds, complaint = tried(name)
    assert seconds < MAX_SECONDS
    assert re.search(CASES[name][2], complaint)
    assert "\n" not in complaint
    assert len(complaint) < 500
    assert not any(word in complaint.lower() for word in ("panic", "backtrace", "<state>"))


def test_a_thread_with_little_stack_can_generate() -> None:
    program = f"""
import threading, ggufspec
from ggufspec.standin.embedded import embedded_draft, embedded_target
def work():
    with ggufspec.load(target=embedded_target(), draft=embedded_draft(), n_threads=1) as engine:
        print(engine.generate("It is ", json_schema={REFS!r}, max_tokens=20).text, flush=True)
threading.stack_size(512 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("true\n", "false\n")


def test_what_takes_too_long_ends_and_the_next_constraint_works() -> None:
    other, schema = (
        {"allOf": [{"type": "string", "pattern": f"{of}.*b.*c{i}"} for i in range(200)]}
        for of in "xa"
    )
    with pytest.raises(OptionError):  # ends the process of the tests before, whose time would count
        grammar.of_json_schema(other)
    began, n_threads, before = time.process_time(), threading.active_count(), child_seconds()
    with pytest.raises(OptionError, match=r"takes longer than 0\.7 s to compile"):
        grammar.of_json_schema(schema)
    assert 0.1 < child_seconds() - before < 2, "one process, which a busy machine ends earlier"
    assert time.process_time() - began < 0.5
    assert threading.active_count() == n_threads
    assert grammar.of_regex("[a-z]+x").startswith("start:")


def test_a_limit_that_a_busy_machine_reached_is_not_remembered() -> None:
    """The process is killed, as for want of memory, before it can answer."""
    grammar.of_regex("a")  # starts the process
    pids = [
        int(pid)
        for each in Path("/proc/self/task").glob("*/children")
        for pid in each.read_text().split()
    ]
    (pid,) = (
        pid for pid in pids if b"grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(pid, signal.SIGSTOP)
    refused: list[str] = []

    def ask() -> None:
        try:
            grammar.of_regex("not remembered")
        except OptionError as error:
            refused.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    thread.join(PATIENCE)
    assert refused == ["the regular expression takes too much memory to compile; simplify it"]
    assert grammar.of_regex("not remembered").startswith("start:")


def test_a_constraint_with_a_crash_in_native_code_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "crashing.py").write_text(
        "import os; from ggufspec.common import child\n"
        "def main(): child.answer_requests(lambda asked: asked or os.abort(), n_bytes_max=2**30)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    process = LimitedProcess("crashing")
    assert process.ask("a", seconds=1) == "a"
    with pytest.raises(LimitExceededError, match="memory"):
        process.ask("", seconds=1)
    assert process.ask("b", seconds=1) == "b"


def test_a_text_with_slow_masks_fails() -> None:
    constraint = GrammarConstraint(byte_table(), grammar.of_regex("[a-z]+"), 0, max_step_seconds=0)
    with pytest.raises(DecodeError, match="longer than 0 s for one token; simplify"):
        constraint.masks([])


def test_forced_text_that_is_slow_to_compute_is_not_drafted_again() -> None:
    constraint = GrammarConstraint(byte_table(), grammar.of_regex("(((a{100}){100}){100}){100}"), 0)
    seconds = []
    for i in range(1, 21):
        began = time.thread_time()
        constraint.forced([ord("a")] * 2000 * i)
        seconds.append(time.thread_time() - began)
    assert sum(seconds) < 4 * max(seconds), "most are skipped"


def test_a_text_reaches_limits_alone_that_other_texts_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this regular expression, each text needs other states of the lexer."""
    monkeypatch.setattr(
        limits,
        "LIMITS",
        LLParserLimits(max_lexer_states=300, max_items_in_row=20_000, verbose_errors=False),
    )
    table, regex = byte_table(), grammar.of_regex("[ab]*a[ab]{9}")
    draw = random.Random(1)
    texts = [draw.choices(b"ab", k=400) for _ in range(3)]

    def n_read(constraint: GrammarConstraint, n_start: int, text: list[int]) -> int:
        for n in range(len(text)):
            try:
                constraint.masks([0] * n_start + text[:n])
            except DecodeError:
                return n
        return len(text)

    alone = [n_read(GrammarConstraint(table, regex, 0), 0, text) for text in texts]
    first = GrammarConstraint(table, regex, 0)
    others = [first.for_another_text(n_start) for n_start in (0, 2)]
    together = [
        n_read(each, n, text)
        for each, n, text in zip([first, *others], (0, 0, 2), texts, strict=True)
    ]
    assert all(50 < n < 300 for n in alone)
    assert all(n >= least for n, least in zip(together, alone, strict=True))
