"""Slots that clients save, restore and erase, as llama.cpp's server has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from engine.test_prompt_cache import prompt_of
from full_disk import contents, longest_file
from patience import PATIENCE
from serving import Live, serving

import ggufspec
from ggufspec.engine import session_file
from ggufspec.engine.engine import Engine
from ggufspec.server.errors import ApiError
from ggufspec.server.service import ServerOptions, make_service
from ggufspec.server.texts import Texts

PROMPT = prompt_of(1)
OTHER = prompt_of(2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "target.gguf")


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Engine]:
    """With two slots."""
    with ggufspec.load(target, n_slots=2, n_threads=1, n_ctx=256, tuned=False) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


@pytest.fixture
def live(engine: Engine, folder: Path) -> Iterator[Live]:
    with running(engine, folder) as made:
        yield made


@contextmanager
def running(engine: Engine, folder: Path | None, **settings: Any) -> Iterator[Live]:
    """A server of an engine that holds no text."""
    engine.forget()
    with serving(
        engine, slot_folder=folder, defaults={"temperature": 0, "ignore_eos": True}, **settings
    ) as found:
        yield found


def used(live: Live) -> int:
    """The one slot that holds a text."""
    (slot,) = [i for i in (0, 1) if live.engine.pair.slots[i].target.n_held]
    return slot


def write(live: Live, prompt: list[int], n: int = 8) -> Any:
    return live.ok("/v1/completions", prompt=prompt, max_tokens=n, timings_per_token=True)


def n_read(live: Live, prompt: list[int]) -> int:
    found = write(live, prompt)
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(found["usage"]["prompt_tokens"] - cached)


def test_a_slot_is_saved_and_restored_by_another_server(engine: Engine, folder: Path) -> None:
    with running(engine, folder) as live:
        text = write(live, PROMPT)["choices"][0]["text"]
        slot = used(live)
        saved = live.ok(f"/slots/{slot}?action=save", filename="one.bin")
        assert saved["timings"].pop("save_ms") > 0
        n_bytes = (folder / "one.bin").stat().st_size
        assert saved == {
            **{"id_slot": slot, "filename": "one.bin", "n_saved": 87, "n_written": n_bytes},
            "timings": {},
        }
    with running(engine, folder) as live:
        write(live, OTHER)
        restored = live.ok("/slots/1?action=restore", filename="one.bin")
        assert restored["timings"].pop("restore_ms") > 0
        assert restored == {
            **{"id_slot": 1, "filename": "one.bin", "n_restored": 87, "n_read": n_bytes},
            "timings": {},
        }
        assert live.engine.pair.slots[1].target.n_held == 87
        assert n_read(live, PROMPT) == 1
        assert write(live, PROMPT)["choices"][0]["text"] == text
        assert n_read(live, OTHER) == 1


def test_a_slot_is_erased(live: Live) -> None:
    write(live, PROMPT)
    slot = used(live)
    assert live.ok(f"/slots/{slot}?action=erase") == {"id_slot": slot, "n_erased": 87}
    assert live.ok(f"/v1/slots/{slot}?action=erase") == {"id_slot": slot, "n_erased": 0}
    assert n_read(live, PROMPT) == 80


def test_the_text_that_was_in_the_slot_is_kept_in_memory(live: Live) -> None:
    write(live, PROMPT)
    slot = used(live)
    live.ok(f"/slots/{slot}?action=save", filename="a")
    live.ok(f"/slots/{slot}?action=erase")
    write(live, OTHER)
    slot = used(live)
    live.ok(f"/slots/{slot}?action=restore", filename="a")
    assert live.engine.pair.slots.cache.n_texts == 1


NAMES: list[Any] = [
    *("", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", "C:a", ".hidden", "a\0b", "a\nb", " "),
    *("x" * 201, "\u202ea", None, 5, ["a"]),
]


def test_names_that_leave_the_folder_are_refused(live: Live, folder: Path) -> None:
    write(live, PROMPT)
    action = "save"
    for name in NAMES:
        response = live.post(f"/slots/0?action={action}", filename=name)
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == "filename"
    assert live.post(f"/slots/0?action={action}").status_code == 400
    assert [*folder.iterdir()] == []


def test_other_mistakes_are_named(live: Live, folder: Path) -> None:
    write(live, PROMPT)
    slot = used(live)
    (folder / "damaged").write_bytes(b"GGUFSPEC" + bytes(1000))
    (folder / "inner").mkdir()
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("/slots/2?action=save", {"filename": "a"}, 400, "slot '2' does not exist; ids are 0 to 1"),
        ("/slots/-1?action=save", {"filename": "a"}, 400, "slot '-1' does not exist"),
        ("/slots/x?action=save", {"filename": "a"}, 400, "slot 'x' does not exist"),
        ("/slots/0?action=drop", {}, 400, "action must be save, restore or erase"),
        ("/slots/0", {}, 400, "action must be save, restore or erase"),
        (f"/slots/{1 - slot}?action=save", {"filename": "a"}, 400, "the slot is empty"),
        ("/slots/0?action=restore", {"filename": "a"}, 400, "session file a does not exist"),
        ("/slots/0?action=restore", {"filename": "inner"}, 400, "is no file"),
        ("/slots/0?action=restore", {"filename": "damaged"}, 400, "version 0 of the format"),
        (f"/slots/{slot}?action=save", {"filename": "inner"}, 500, "the file cannot be written"),
        ("/slots/0?action=save", {"filename": "a", "file": 1}, 400, "file"),
    ]
    for path, body, status, message in cases:
        response = live.post(path, **body)
        assert response.status_code == status, path
        found = response.json()["error"]["message"]
        assert message in found
        assert str(folder) not in found
    assert n_read(live, PROMPT) == 1


def test_without_a_folder_there_is_nothing(engine: Engine) -> None:
    with running(engine, None) as live:
        for action in ("save", "restore", "erase"):
            response = live.post(f"/slots/0?action={action}", filename="a")
            assert response.status_code == 501
            assert "--slot-save-path" in response.json()["error"]["message"]


def test_a_file_that_cannot_be_replaced_stays(live: Live, folder: Path) -> None:
    write(live, PROMPT)
    slot = used(live)
    saved = live.ok(f"/slots/{slot}?action=save", filename="a")
    before = contents(folder)
    for limit in (0, 100, saved["n_written"] - 1):
        with longest_file(limit):
            response = live.post(f"/slots/{slot}?action=save", filename="a")
        assert response.status_code == 500
        assert "the file cannot be written" in response.json()["error"]["message"]
        assert contents(folder) == before
    restored = live.ok(f"/slots/{slot}?action=restore", filename="a")
    assert restored["n_restored"] == saved["n_saved"]


def test_a_slot_in_use_is_saved_once_its_text_is_over(engine: Engine, folder: Path) -> None:
    with running(engine, folder) as live, ThreadPoolExecutor(3) as pool:
        slots = live.engine.pair.slots
        texts = [pool.submit(write, live, prompt_of(i, 20), 230) for i in (1, 2)]
        while not all(slot.is_used for slot in slots):
            time.sleep(0.001)
        saved = live.ok("/slots/0?action=save", filename="a")
        assert saved["n_saved"] >= 249
        for text in texts:
            text.result(PATIENCE)


def test_a_slot_in_use_for_too_long_is_not_waited_for(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Texts, "call", lambda *_: Future())  # never done
    with running(engine, folder, timeout=0.1) as live:
        response = live.post("/slots/0?action=erase")
    assert response.status_code == 504
    assert "--timeout" in response.json()["error"]["message"]


def test_a_server_that_stops_takes_no_work(engine: Engine) -> None:
    texts = make_service(engine, ServerOptions("tiny")).texts
    assert texts.call(engine.pair.slots[0], lambda: 1).result(PATIENCE) == 1
    texts.finish()
    with pytest.raises(ApiError, match="stopping"):
        texts.call(engine.pair.slots[0], lambda: 1)


def test_files_are_read_outside_of_the_engines_thread(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts go on while gigabytes are read."""
    names: list[str] = []
    real = session_file.read

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return real(*arguments)

    monkeypatch.setattr(session_file, "read", noted)
    write(live, PROMPT)
    slot = used(live)
    live.ok(f"/slots/{slot}?action=save", filename="a")
    live.ok("/slots/0?action=restore", filename="a")
    assert names
    assert "ggufspec" not in names
