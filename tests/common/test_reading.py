"""Files that users name: regular ones, pipes, devices and folders."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from patience import PATIENCE

from ggufspec.common import reading
from ggufspec.common.files import check_writable, write_file
from ggufspec.common.reading import read_file
from ggufspec.errors import CacheError, OptionError, PromptError

with_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")


@with_pipes
def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"hello",))
    writer.start()
    assert read_file(pipe, "the prompt file", PromptError) == b"hello"
    writer.join()


@with_pipes
def test_a_pipe_that_nothing_is_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIPE_SECONDS", 0.1, raising=False)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # So that a read that waits for ever ends after all.
    rescue = threading.Timer(PATIENCE, lambda: pipe.write_bytes(b"too late"))
    rescue.daemon = True
    rescue.start()
    with pytest.raises(PromptError, match="pipe that no program has written to"):
        read_file(pipe, "the prompt file", PromptError)
    rescue.cancel()


@with_pipes
def test_a_pipe_with_a_slow_writer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is for a program that opens the pipe, not for its first byte."""
    monkeypatch.setattr(reading, "PIPE_SECONDS", 0.1, raising=False)
    read_end, writing = os.pipe()
    writer = threading.Timer(0.5, lambda: (os.write(writing, b"hello"), os.close(writing)))
    writer.start()
    assert read_file(Path(f"/dev/fd/{read_end}"), "the prompt file", PromptError) == b"hello"
    os.close(read_end)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"the grammar file .* is a folder; name a file in it"):
        read_file(tmp_path, "the grammar file", OptionError)
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read_file(tmp_path / "none", "the prompt file", PromptError)
    monkeypatch.setattr(reading, "MOST_BYTES", 3)
    (tmp_path / "long").write_bytes(b"four")
    with pytest.raises(PromptError, match="is longer than 3 bytes"):
        read_file(tmp_path / "long", "the prompt file", PromptError)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 2**22)
    with pytest.raises(PromptError, match="is longer than"):
        read_file(Path("/dev/zero"), "the prompt file", PromptError)


@with_pipes
def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_file(pipe, b"hello")
    reader.join(PATIENCE)
    assert found == [b"hello"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_refuses(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(CacheError, match="No space left"):
        write_file(link, b"hello")
    assert link.is_symlink()
