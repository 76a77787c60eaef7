"""What several tests of this folder share: a pair of files, and the process of templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from ggufspec.engine.chat_template import TemplateProcess


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of three layers, and a draft of one."""
    folder = tmp_path_factory.mktemp("models")
    return (
        tiny.write_llama(folder / "target.gguf", n_layer=3),
        tiny.write_llama(folder / "draft.gguf", n_layer=1),
    )


@pytest.fixture(scope="session")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess()
    yield made
    made.close()
