"""Files are written whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggufspec.common.files import write_file
from ggufspec.errors import CacheError


def test_a_file_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "plot.svg"
    path.write_text("of old")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(CacheError, match=r"plot\.svg into the folder .*: Permission denied"):
        write_file(path, b"new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["of old"]
