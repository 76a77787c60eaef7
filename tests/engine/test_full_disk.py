"""A text that cannot be saved leaves the file that was there, which can still be restored."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.test_prompt_cache import ALL, load, prompt_of
from full_disk import PAGE, contents, longest_file, small_disk

from ggufspec.errors import CacheError


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with load(ALL["draft"](tmp_path)) as engine, small_disk(tmp_path / "small") as disk:
        path = disk.folder / "session"
        saved = engine.save(path, prompt_of(1))
        before = contents(disk.folder)
        lengths = (0, 1, 52, 53, 700, saved.n_bytes // 2, saved.n_bytes - 1)
        for limit in lengths:
            with longest_file(limit), pytest.raises(CacheError, match=r"session.*File too large"):
                engine.save(path, prompt_of(2))
            assert contents(disk.folder) == before
        for n_bytes in range(0, saved.n_bytes, PAGE):
            disk.leave(n_bytes)
            with pytest.raises(CacheError, match=r"session.*not enough space.*free there"):
                engine.save(path, prompt_of(2))
            assert contents(disk.folder) == before
        assert engine.restore(path) == saved
        disk.leave_all()
        again = engine.save(path, prompt_of(2))
        assert engine.restore(path) == again != saved
        assert [*contents(disk.folder)] == ["session"]
