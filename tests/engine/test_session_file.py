"""A text that is saved on the disk is not read again, and a file that is no good is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from engine.test_prompt_cache import ALL, GREEDY, HEADS, KINDS, Files, how_of, load, prompt_of
from patience import PATIENCE

from ggufspec.engine import session_file
from ggufspec.engine.engine import Engine
from ggufspec.engine.prompt_cache import CachedText, PromptCache
from ggufspec.errors import (
    CacheError,
    DecodeError,
    GgufspecError,
    OptionError,
    SessionError,
)
from ggufspec.llama import saved_text
from ggufspec.llama.context_options import default_attention
from ggufspec.llama.saved_text import SavedText

START = 8 + 4 + 8 + 32  # bytes before the header


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_not_read_again_by_another_engine(kind: str, tmp_path: Path) -> None:
    files = ALL[kind](tmp_path)
    how, path = how_of(files), tmp_path / "session"
    with load(files) as engine:
        written = engine.generate(prompt_of(1), **how)
        text = [*prompt_of(1), *written.tokens]
        saved = engine.save(path, text)
        assert engine.generate([*text, 5], **how).stats.n_prompt_reused >= len(text) - 1
        engine.forget()
        expected = [engine.generate([*text, 5], **how).tokens]
        engine.forget()
        expected.append(engine.generate([*text[:60], 5], **how).tokens)
        unread = engine.save(tmp_path / "unread", prompt_of(3))
        assert list(unread.tokens) == prompt_of(3)[:-1], "it was read first"
    assert saved.n_bytes == path.stat().st_size
    assert text[:-1] == saved.tokens[: len(text) - 1]
    with load(files) as engine:
        assert engine.restore(path) == saved
        after = engine.generate([*text, 5], **how)
        assert after.stats.n_prompt_reused >= len(text) - 2
        assert after.tokens == expected[0]
        if kind in HEADS and after.stats.n_drafted:
            assert after.stats.n_rounds_without_draft <= 1
        engine.restore(path)
        assert engine.generate([*text[:60], 5], **how).tokens == expected[1]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return ALL["draft"](tmp_path)


@pytest.fixture
def engine(files: Files) -> Iterator[Engine]:
    with load(files) as loaded:
        yield loaded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session"


def test_texts_and_messages_are_saved_too(tmp_path: Path, path: Path) -> None:
    target = tiny.write_llama(tmp_path / "chat.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML)
    messages = [{"role": "user", "content": "hello world"}]
    with load({"target": target}) as engine:
        assert engine.save(path, "hello world").tokens == engine.tokenize("hello world")[:-1]
        assert engine.save(path, messages).tokens == engine.render(messages)[:-1]
        engine.forget()
        engine.restore(path)
        written = engine.chat(messages, **GREEDY)
    assert written.stats.n_prompt_reused == written.stats.n_prompt - 1


def test_a_text_in_the_cache_in_memory_is_saved_without_reading_it(
    files: Files, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptCache, "observe_copy", lambda *_: None)  # it is cheap
    with load(files) as engine:
        written = engine.generate(prompt_of(1), **how_of(files))
        engine.generate(prompt_of(2), **how_of(files))
        before = engine.pair.target.decode_seconds
        engine.save(path, [*prompt_of(1), *written.tokens])
        assert engine.pair.target.decode_seconds == before
        assert engine.pair.slots.cache.n_texts == 1  # that of the slot has taken its place
        again = engine.generate([*prompt_of(2), 5], **how_of(files))
    assert again.stats.n_prompt_reused >= 80


# Files that are refused


def test_other_targets_types_and_sizes_are_named(tmp_path: Path, files: Files, path: Path) -> None:
    with load(files) as engine:
        engine.save(path, prompt_of(1))
    other = {"target": tiny.write_llama(tmp_path / "other.gguf", seed=5)}
    usual = default_attention()
    cases: list[tuple[Files, dict[str, Any], str]] = [
        (other, {}, "this target: its fingerprint is"),
        (files, {"type_k": "f32"}, "its type_k is f16, and now it is f32"),
        (files, {"flash_attention": "off"}, f"its flash_attention is {usual}, and now it is off"),
        (files, {"n_ctx": 64}, "a text of 79 tokens, and the context has 64"),
    ]
    for changed, options, message in cases:
        with pytest.raises(GgufspecError, match=message), load(changed, **options) as engine:
            engine.restore(path)


def test_separate_caches_need_as_many_slots(tmp_path: Path, path: Path) -> None:
    files = ALL["windows"](tmp_path)
    with load(files, n_slots=2) as engine:
        engine.save(path, prompt_of(1))
    with (
        load(files) as engine,
        pytest.raises(SessionError, match="n_slots of separate caches is 2"),
    ):
        engine.restore(path)


def test_another_draft_reads_the_text_anew(tmp_path: Path, files: Files, path: Path) -> None:
    how = how_of(files)
    with load(files) as engine:
        engine.save(path, prompt_of(1))
        expected = engine.generate([*prompt_of(1), 5], **how).tokens
    other = tiny.write_llama(tmp_path / "other.gguf", seed=5)
    for draft in (None, other):
        with load({**files, "draft": draft}) as engine:
            engine.restore(path)
            found = engine.generate([*prompt_of(1), 5], **(how if draft else GREEDY))
            assert found.tokens == expected
            assert found.stats.n_prompt_reused >= 79


def test_a_head_needs_its_own_states(tmp_path: Path, path: Path) -> None:
    """Without them the target would read all of the text again."""
    files = ALL["eagle3"](tmp_path)
    with load({"target": files["target"]}) as engine:
        engine.save(path, prompt_of(1))
    with load(files) as engine:
        with pytest.raises(SessionError, match="this draft: the file was saved without it"):
            engine.restore(path)
        engine.save(path, prompt_of(1))
    with load({"target": files["target"]}) as engine:
        engine.restore(path)
        assert engine.generate([*prompt_of(1), 5], **GREEDY).stats.n_prompt_reused >= 79


def test_what_is_no_session_is_refused(engine: Engine, path: Path, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="does not exist"):
        engine.restore(path)
    with pytest.raises(SessionError, match="is no file"):
        engine.restore(tmp_path)
    for data in (b"", b"hello", b"GGUF" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(SessionError, match="is no session of ggufspec"):
            engine.restore(path)
    path.write_bytes(b"GGUFSPEC")
    with pytest.raises(SessionError, match="damaged or cut off"):
        engine.restore(path)
    path.write_bytes(b"GGUFSPEC\x09" + bytes(100))
    with pytest.raises(SessionError, match="has version 9 of the format"):
        engine.restore(path)
    with pytest.raises(OptionError):
        engine.restore(7)  # type: ignore[arg-type]


def test_damaged_files_never_reach_llama_cpp(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(path, prompt_of(1, 12))
    whole, dice = path.read_bytes(), random.Random(1)
    monkeypatch.setattr(saved_text, "restore", None)
    for _ in range(300):
        path.write_bytes(mutated(whole, dice))
        with pytest.raises(SessionError):
            engine.restore(path)


def mutated(whole: bytes, dice: random.Random) -> bytes:
    """Another file: bytes are changed, cut off, put in, left out, repeated."""
    while True:
        data, how = bytearray(whole), dice.randrange(6)
        a, b = sorted(dice.choices(range(len(data)), k=2))
        if dice.randrange(2):  # in the first bytes
            a, b = a % 1500, max(a % 1500 + 1, b % 1500)
        if how == 0:
            data[a] ^= 1 << dice.randrange(8)
        elif how == 1:
            del data[a:]
        elif how == 2:
            del data[a:b]
        elif how == 3:
            data[a:a] = dice.randbytes(dice.randrange(1, 40))
        elif how == 4:
            data[a:b] = dice.randbytes(b - a)
        else:
            data[a:a] = data[a:b]
        if data != whole:
            return bytes(data)


HOSTILE: list[Any] = [None, -1, 0, 1, 2**31, 2**47, 2**64, 0.5, True, "", "x", [], [[]], {}, [1, 2]]
NONE: list[Any] = [("checkpoints", ""), ("checkpoints", {})]


def test_headers_with_other_values_are_refused_although_their_hash_is_right(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(path, prompt_of(1, 12))
    whole, dice = path.read_bytes(), random.Random(1)
    n = int.from_bytes(whole[12:20], "little")
    monkeypatch.setattr(saved_text, "restore", None)
    for _ in range(300):
        header = json.loads(whole[START : START + n])
        at: Any = header
        keys: list[Any] = []
        while True:
            key = dice.choice([*at] if isinstance(at, dict) else [*range(len(at))])
            keys.append(key)
            if not isinstance(at[key], (dict, list)) or not at[key] or dice.randrange(4) == 0:
                break
            at = at[key]
        at[key] = dice.choice([each for each in HOSTILE if each != at[key]])
        if keys[:1] == ["models"] and keys[1:2] == [1]:
            continue  # of a draft model: allowed
        if keys[-1] in ("n_prompt", "n_least") or (keys[-1], at[key]) in NONE:
            continue  # other numbers that may be, and other forms of nothing
        data = json.dumps(header).encode()
        path.write_bytes(signed(data) + whole[START + n :])
        with pytest.raises(SessionError):
            engine.restore(path)
    for data in (b"[" * 5000, b"null", b"[]", b"\xff", b'{"models": 3}', b'{"a": 1e999}'):
        path.write_bytes(signed(data) + whole[START + n :])
        with pytest.raises(SessionError, match="damaged"):
            engine.restore(path)


def signed(header: bytes) -> bytes:
    """What is before the payload, with the right hash."""
    digest = hashlib.sha256(header).digest()
    return (
        b"GGUFSPEC"
        + (2).to_bytes(4, "little")
        + len(header).to_bytes(8, "little")
        + digest
        + header
    )


def test_cells_that_llama_cpp_refuses_are_an_error_and_leave_the_slot_empty(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise DecodeError("restored 0 bytes")

    expected = engine.generate(prompt_of(1), **GREEDY).tokens
    engine.save(path, prompt_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(saved_text, "restore", refused)
        with pytest.raises(SessionError, match="cannot be restored"):
            engine.restore(path)
    again = engine.generate(prompt_of(1), **GREEDY)
    assert (again.stats.n_prompt_reused, again.tokens) == (0, expected)


# Files that are written


def test_a_save_that_is_killed_leaves_the_file_as_it_was(files: Files, path: Path) -> None:
    with load(files) as engine:
        engine.save(path, prompt_of(1))
    before = path.read_bytes()
    code = (
        "import os, signal, sys, ggufspec\n"
        "from ggufspec.common import files\n"
        "real, n = files.write_all, 0\n"
        "def killed(file, chunk):\n"
        "    global n\n"
        "    n += 1\n"
        "    real(file, chunk)\n"
        "    n < 4 or os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_all = killed\n"
        "target, draft, path = sys.argv[1:]\n"
        "with ggufspec.load(target, draft, n_ctx=256, n_threads=1, tuned=False) as engine:\n"
        "    engine.save(path, list(range(3, 60)))\n"
    )
    command = [sys.executable, "-c", code, files["target"], files["draft"], path]
    done = subprocess.run(command, timeout=PATIENCE, env=os.environ.copy(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len([*path.parent.glob("session*")]) == 2  # what was written so far
    with load(files) as engine:
        assert len(engine.restore(path).tokens) == 79
        engine.save(path, prompt_of(2))
    assert [*path.parent.glob("session*")] == [path]


def test_a_place_that_cannot_be_written_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="cannot write"):
        engine.save(tmp_path / "file" / "session", prompt_of(1))
    with pytest.raises(CacheError, match="no file that can be replaced"):
        engine.save("/dev/null", prompt_of(1))


def test_all_parts_of_a_text_come_back(path: Path) -> None:
    random = np.random.default_rng(1)
    state = random.normal(size=(1, 7)).astype(np.float32)
    cells = random.integers(0, 255, 1000, np.uint8)
    checkpoint = random.integers(0, 255, 33, np.uint8)
    target = SavedText(array("i", [5, 6, 7]), cells, [(1, checkpoint), (3, cells)], 3)
    head = SavedText(array("i", [5, 6]), checkpoint, state=state)
    text = CachedText(target.tokens, [target, head])
    keys = [{"is_head": False}, {"is_head": True}]
    facts = session_file.write(path, text, keys)
    found, n_bytes = session_file.read(path, keys, 3)
    assert facts == ([5, 6, 7], n_bytes)
    for mine, theirs in zip(found.saved, (target, head), strict=True):
        assert mine is not None
        assert mine.tokens == theirs.tokens
        assert mine.cells.tobytes() == theirs.cells.tobytes()
        numbers = [(n, each.tobytes()) for n, each in theirs.checkpoints]
        assert [(n, each.tobytes()) for n, each in mine.checkpoints] == numbers
        assert mine.n_least == theirs.n_least
    assert found.saved[1] is not None
    assert found.saved[1].state is not None
    assert (found.saved[1].state == state).all()
