"""`ggufspec run --prompt-cache`: a later run reads only what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from cli.conftest import Command

PROMPT = "hello world, the model of the end " * 3
MORE = " and hello"


@pytest.fixture
def session(tmp_path: Path) -> Path:
    return tmp_path / "session"


def asked(target: Path, *more: object, prompt: str = PROMPT, n: int = 8) -> list[object]:
    how = ("--temp", "0", "-fa", "off", "--json", "--ignore-eos")
    return ["-m", target, "-p", prompt, "-n", str(n), *how, *more]


def stats(result: Any) -> dict[str, Any]:
    assert result.code == 0, result.err
    return dict(json.loads(result.out))


def test_a_longer_prompt_reads_what_is_new(
    run: Command, target: Path, draft: Path, session: Path
) -> None:
    with_draft = ("-md", draft, "--prompt-cache", session)
    first = run(*asked(target, *with_draft))
    assert stats(first)["n_prompt_reused"] == 0
    assert session.stat().st_size > 1000
    plain = run(*asked(target, prompt=PROMPT + MORE))
    longer = run(*asked(target, *with_draft, prompt=PROMPT + MORE))
    assert stats(longer)["n_prompt_reused"] >= stats(first)["n_prompt"] - 2
    assert json.loads(longer.out)["text"] == json.loads(plain.out)["text"]


def test_the_file_can_be_left_as_it_is(run: Command, target: Path, session: Path) -> None:
    missing = run(*asked(target, "--prompt-cache", session, "--prompt-cache-ro"))
    assert missing.code == 1
    assert "the session file session does not exist" in missing.err
    run(*asked(target, "--prompt-cache", session))
    before = session.read_bytes()
    longer = asked(target, "--prompt-cache", session, "--prompt-cache-ro", prompt=PROMPT + MORE)
    assert stats(run(*longer))["n_prompt_reused"] > 20
    assert session.read_bytes() == before


def test_a_file_that_cannot_be_used_ends_the_run(
    run: Command, target: Path, tmp_path: Path, session: Path
) -> None:
    session.write_bytes(b"something else")
    result = run(*asked(target, "--prompt-cache", session))
    assert (result.code, result.out) == (1, "")
    assert "is no session of ggufspec" in result.err
    assert session.read_bytes() == b"something else"
    (tmp_path / "file").write_bytes(b"")
    result = run(*asked(target, "--prompt-cache", tmp_path / "file" / "session"))
    assert result.code == 1
    assert "cannot write" in result.err


def test_a_full_context_is_saved_as_far_as_it_goes(
    run: Command, target: Path, session: Path
) -> None:
    """One that shifted without what was dropped."""
    how = ("--prompt-cache", session, "-c", "128")
    assert stats(run(*asked(target, *how, n=1000)))["n_generated"] > 10
    assert stats(run(*asked(target, *how)))["n_prompt_reused"] > 20
    how = (*how, "--context-shift")
    assert stats(run(*asked(target, *how, n=200)))["n_generated"] == 200
    assert run(*asked(target, *how)).code == 0


def test_a_file_that_cannot_be_written_takes_no_text_away(
    run: Command, tmp_path: Path, session: Path
) -> None:
    resource = pytest.importorskip("resource")
    target = tiny.write_llama(tmp_path / "wide.gguf", n_embd=256)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        result = run(*asked(target, "--prompt-cache", session))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.code == 1
    assert "cannot write session" in result.err
    assert json.loads(result.out)["n_generated"] == 8
    assert not session.exists()
