"""The tiny pair that most audits here are of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.write_llama(folder / "target.gguf")
    return target, tiny.write_llama(folder / "draft.gguf", n_layer=1)


@pytest.fixture(scope="module")
def pair(paths: tuple[Path, Path]) -> Iterator[Engine]:
    with ggufspec.load(*paths, n_threads=1, n_draft_max=4) as made:
        yield made
