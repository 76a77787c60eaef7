"""What is remembered comes back in another process, or not at all; it never gets in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from full_disk import contents, longest_file
from processes import python

from ggufspec.drafting import profile_store
from ggufspec.drafting.profile_store import TunedSettings, recall, remember

FACTS: dict[str, Any] = {
    "target": {"description": "llama 8B Q4_0", "n_params": 8_030_261_312},
    "draft": None,
    "device": {"gpus": ["CUDA0: NVIDIA H200"], "cpu": "AMD EPYC Genoä"},
}
DOCUMENT = {"seconds": {"1": 0.25, "2": 0.5}, "by": "tune"}


def the_file() -> Path:
    (path,) = profile_store.folder().iterdir()
    return path


def change(**fields: object) -> None:
    """Write the one file anew, with other fields."""
    path = the_file()
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_was_remembered_is_recalled() -> None:
    assert recall(FACTS) is None
    assert remember(FACTS, DOCUMENT)
    assert recall(FACTS) == DOCUMENT
    assert remember(FACTS, {"by": "another"})
    assert recall(FACTS) == {"by": "another"}


def test_an_update_changes_what_is_there() -> None:
    for n in range(3):
        assert profile_store.update(FACTS, lambda known: {"n": [*known.get("n", []), len(known)]})
        assert recall(FACTS) == {"n": [0, 1, 1][: n + 1]}


def test_processes_that_update_at_once_lose_nothing() -> None:
    program = """
        import sys
        from ggufspec.drafting import profile_store
        for n in range(20):
            entry = {f"{sys.argv[1]} {n}": n}
            assert profile_store.update({"about": "this"}, lambda known: {**known, **entry})
    """
    with ThreadPoolExecutor(3) as pool:
        [*pool.map(lambda name: python(program, args=(name,)), "abc")]
    found = recall({"about": "this"})
    assert found == {f"{name} {n}": n for name in "abc" for n in range(20)}


def test_a_damaged_file_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    remember(FACTS, DOCUMENT)
    path = the_file()
    with caplog.at_level(logging.WARNING, logger="ggufspec"):
        path.write_bytes(path.read_bytes()[:-20])
        assert recall(FACTS) is recall(FACTS) is None
    (line,) = caplog.messages
    assert str(path) in line
    assert profile_store.update(FACTS, lambda known: {"known": {**known}})
    assert recall(FACTS) == {"known": {}}


def test_other_facts_are_another_key() -> None:
    remember(FACTS, DOCUMENT)
    assert recall({**FACTS, "draft": {}}) is None
    assert recall({**FACTS, "device": {**FACTS["device"], "gpus": []}}) is None


def test_the_key_is_the_same_in_every_process_and_order() -> None:
    turned = dict(reversed(FACTS.items()))
    program = f"from ggufspec.drafting import profile_store; print(profile_store.key({turned!r}))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {profile_store.key(FACTS)}


def test_a_person_can_read_the_file() -> None:
    remember(FACTS, DOCUMENT)
    content = json.loads(the_file().read_text(encoding="utf-8"))
    assert content == {"format": 3, "facts": FACTS, "document": DOCUMENT}
    assert the_file().read_text().count("\n") > 5, "in lines"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"format": 3, "facts": {"x": 1},',
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"format": 3}',
        b'{"format": 3, "facts": {}, "document": {}}',
        b'{"format": 3, "facts": {"x": NaN}, "document": {}}',
    ],
    ids=lambda damage: repr(damage[:40]),
)
def test_a_damaged_file_is_not_known(damage: bytes) -> None:
    remember(FACTS, DOCUMENT)
    path = the_file()
    path.write_bytes(damage)
    assert recall(FACTS) is None
    assert list(profile_store.records()) == []
    assert remember(FACTS, DOCUMENT), "and is replaced"
    assert recall(FACTS) == DOCUMENT


@pytest.mark.parametrize(
    "fields",
    [
        {"format": 2},
        {"facts": {**FACTS, "draft": {}}},
        {"facts": []},
        {"document": [1]},
    ],
    ids=str,
)
def test_a_newer_or_foreign_file_is_not_known(fields: dict[str, object]) -> None:
    remember(FACTS, DOCUMENT)
    change(**fields)
    assert recall(FACTS) is None


def test_a_folder_in_the_place_of_a_file_is_not_known() -> None:
    remember(FACTS, DOCUMENT)
    path = the_file()
    path.unlink()
    path.mkdir()
    assert recall(FACTS) is None
    assert not remember(FACTS, DOCUMENT)
    assert profile_store.forget() == 0


def test_what_cannot_be_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GGUFSPEC_CACHE", str(file))
    assert not remember(FACTS, DOCUMENT)
    assert recall(FACTS) is None
    assert profile_store.forget() == 0
    assert list(profile_store.records()) == []


def test_what_was_remembered_stays_where_a_disk_is_full() -> None:
    """At whichever byte the write fails; tuned settings are kept, too."""
    assert remember(FACTS, DOCUMENT)
    n_bytes = the_file().stat().st_size
    profile_store.remember_settings(FACTS, TunedSettings(6, 1, "off"))
    before = contents(profile_store.folder())
    for limit in range(0, n_bytes - 10, 97):
        with longest_file(limit):
            assert not remember(FACTS, {**DOCUMENT, "by": "test"})
            assert not profile_store.remember_settings(FACTS, TunedSettings(8))
            assert profile_store.obstacle() is not None
        assert contents(profile_store.folder()) == before
    assert recall(FACTS) == DOCUMENT
    assert profile_store.settings(FACTS) == TunedSettings(6, 1, "off")


def test_without_a_home_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSPEC_CACHE", "~nobody-of-that-name/cache")
    assert not remember(FACTS, DOCUMENT)
    assert recall(FACTS) is None
    assert profile_store.forget() == 0


def test_processes_that_write_at_once_leave_one_whole_file() -> None:
    program = (
        "import sys; from ggufspec.drafting.profile_store import *\n"
        f"for i in range(30): assert remember({FACTS!r}, {{'who': sys.argv[1], 'i': i}})"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, who]) for who in "ab"]
    while any(process.poll() is None for process in running):
        found = recall(FACTS)
        assert found is None or set(found) == {"who", "i"}
    assert [process.returncode for process in running] == [0, 0]
    found = recall(FACTS)
    assert found is not None
    assert found["i"] == 29
    the_file()


def test_forgetting_one_or_all() -> None:
    other = {**FACTS, "draft": {}}
    remember(FACTS, DOCUMENT)
    remember(other, DOCUMENT)
    (profile_store.folder() / "README.txt").write_text("not ours")
    assert {record.key for record in profile_store.records()} == {
        profile_store.key(FACTS),
        profile_store.key(other),
    }
    assert profile_store.forget(profile_store.key(other)) == 1
    assert profile_store.forget(profile_store.key(other)) == 0
    assert recall(FACTS) == DOCUMENT
    assert profile_store.forget() == 1
    assert recall(FACTS) is None
    assert the_file().name == "README.txt"


# TunedSettings


def test_settings_are_remembered_beside_documents() -> None:
    assert profile_store.settings(FACTS) == TunedSettings()
    found = TunedSettings(6, 1, "off", 1024, 64)
    assert profile_store.remember_settings(FACTS, found)
    assert profile_store.settings(FACTS) == found
    assert recall(FACTS) is None, "they are another record"


def test_what_was_not_found_out_this_time_stays_known() -> None:
    profile_store.remember_settings(FACTS, TunedSettings(6, 1, "off"))
    profile_store.remember_settings(FACTS, TunedSettings(n_threads_draft=2))
    assert profile_store.settings(FACTS) == TunedSettings(6, 2, "off")


@pytest.mark.parametrize("value", [0, 513, True, "6", 2.0, None, [6]])
def test_settings_that_make_no_sense_are_not_taken(value: object) -> None:
    profile_store.remember_settings(FACTS, TunedSettings(6, 1, "off"))
    document = {"n_threads": value, "n_threads_draft": 1, "flash_attention": value}
    document["n_batch"] = 2**21 if value == 513 else value
    change(document=document)
    assert profile_store.settings(FACTS) == TunedSettings(None, 1, None)


# Fingerprints


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1024
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(content)
    two.write_bytes(content)
    known = profile_store.fingerprint(one)
    assert known
    assert profile_store.fingerprint(two) == known
    for changed in (b"!" + content[1:], content[:-1] + b"!", content[:-1], content + b"!", b""):
        two.write_bytes(changed)
        assert profile_store.fingerprint(two) not in (known, None)
    assert profile_store.fingerprint(tmp_path / "gone") is None
