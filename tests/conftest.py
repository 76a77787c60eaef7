"""No test reads or writes the user's cache folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

_numbers = count()


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of caches; fixtures that live longer than a test use one of it too."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGUFSPEC_CACHE", str(folder / "shared"))
        yield folder


@pytest.fixture(autouse=True)
def _own_cache(_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with nothing remembered."""
    monkeypatch.setenv("GGUFSPEC_CACHE", str(_caches / str(next(_numbers))))
