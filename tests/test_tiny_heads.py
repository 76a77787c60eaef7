"""The planted targets compute their tables, which the tests of heads count on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
from tiny_heads import SMALL, Head, Table

from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

TABLES = [Table(), Table(n_classes=4), Table(n_classes=2, vocab=SMALL)]


def glm(path: Path, table: Table) -> Path:
    return tiny_heads.write_glm4moe(path, table, Head(table=table))


def qwen(path: Path, table: Table) -> Path:
    return tiny_heads.write_qwen35(path, table, Head(table=table))


def step(path: Path, table: Table) -> Path:
    return tiny_heads.write_step35(path, table, [Head(table=table)] * 2)


def differences(path: Path, table: Table) -> list[float]:
    """The largest difference of the model's logits from the table's, for texts of 2 to 100."""
    tokens = np.random.default_rng(5).choice(table.spoken, 100).tolist()
    with (
        closing(Model(path)) as model,
        closing(Context(model, ContextOptions(n_ctx=128, n_threads=1))) as context,
    ):
        session = LlamaSession(context)
        return [
            float(np.abs(session.score(tokens[:n])[-1] - table.logits(tokens[:n])).max())
            for n in (2, 3, 4, 50, 99, 100)
        ]


@pytest.mark.parametrize(
    "write", [glm, qwen, step, tiny_heads.write_llama_table, tiny_heads.write_gemma4]
)
@pytest.mark.parametrize("table", TABLES, ids=["cycle", "classes", "small"])
def test_a_target_computes_its_table(
    write: Callable[[Path, Table], Path], table: Table, tmp_path: Path
) -> None:
    assert max(differences(write(tmp_path / "target.gguf", table), table)) < 0.05


def test_a_recurrent_target_remembers_the_last_marker(tmp_path: Path) -> None:
    table = Table(n_classes=4, n_markers=5)
    assert max(differences(qwen(tmp_path / "target.gguf", table), table)) < 0.1


def test_a_head_is_wrong_after_the_planned_share_of_tokens() -> None:
    table = Table()
    head = Head(table=table, right=0.75)
    is_right = [head.drafted([1, x], 1) == table.greedy([1, x], 1) for x in table.spoken]
    assert np.mean(is_right) == pytest.approx(0.75, abs=0.01)
