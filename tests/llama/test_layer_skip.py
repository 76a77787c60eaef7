"""A model with skipped layers computes what a file without these layers does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ggufspec.errors import ModelError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.layer_skip import LayerSkip
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.models.gguf_file import write
from ggufspec.models.header import read_header
from ggufspec.models.trim import trimmed
from ggufspec.standin.embedded import embedded_target

OPTIONS = ContextOptions(n_ctx=64, n_rows=8, n_threads=1)
TOKENS = [5, 300, 17, 1200, 44, 9, 300, 61]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with closing(Model(embedded_target())) as made:
        yield made


def logits(model: Model, skip: LayerSkip | None = None) -> np.ndarray:
    with closing(Context(model, OPTIONS, skip)) as context:
        return LlamaSession(context).score(TOKENS[:1], TOKENS[1:]).copy()


@pytest.mark.parametrize("left_out", [{1}, {2, 3}, {1, 3, 4}])
def test_it_equals_a_file_without_them(left_out: set[int], model: Model, tmp_path: Path) -> None:
    skip = LayerSkip()
    skip.skip(left_out)
    kept = [layer for layer in range(model.n_layers) if layer not in left_out]
    path = tmp_path / "cut.gguf"
    write(trimmed(read_header(model.path), layers=kept), path)
    with closing(Model(path)) as cut:
        expected = logits(cut)
    assert logits(model, skip) == pytest.approx(expected, abs=1e-3)
    assert logits(model) != pytest.approx(expected, abs=1e-1)


def test_layers_may_change_between_passes(model: Model) -> None:
    skip = LayerSkip()
    with closing(Context(model, OPTIONS, skip)) as context:
        session = LlamaSession(context)
        skip.skip({2})
        first = session.score(TOKENS).copy()
        session.forget()
        skip.skip(set())
        assert session.score(TOKENS) == pytest.approx(logits(model)[-1:], abs=1e-3)
        session.forget()
        skip.skip({2})
        assert session.score(TOKENS) == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("layer", [0, 99])
def test_layers_that_cannot_be_skipped(layer: int, model: Model) -> None:
    skip = LayerSkip()
    skip.skip({layer})
    with pytest.raises(ModelError, match="cannot be skipped"):
        logits(model, skip)
