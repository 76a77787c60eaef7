"""What the tiny models promise to the other tests, which could not fail without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads
from experts import ranked_experts
from tiny_tables import SMALL, Head, Table

from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

DECODERS = [
    tiny.write_llama,
    tiny.write_swa,
    tiny.write_moe,
    tiny.write_mamba,
    tiny.write_rwkv,
    tiny.write_hybrid,
    tiny.write_qwen35,
]
PROMPT = [1, *tiny.SPM.spell(" hello world")]
TABLES = [Table(), Table(n_classes=4), Table(n_classes=2, vocab=SMALL)]
Writer = Callable[..., Path]


def rows_of(path: Path, tokens: Sequence[int]) -> tiny.F32:
    """The logits after each of the tokens."""
    options = ContextOptions(n_ctx=256, n_batch=256, n_rows=256, n_threads=1)
    with closing(Model(path)) as model, closing(Context(model, options)) as context:
        rows: tiny.F32 = LlamaSession(context).score(tokens[:1], tokens[1:]).copy()
    return rows


def greedy(path: Path, n_tokens: int) -> list[int]:
    """The prompt, with its greedy continuation token by token."""
    options = ContextOptions(n_ctx=256, n_threads=1)
    with closing(Model(path)) as model, closing(Context(model, options)) as context:
        session, tokens = LlamaSession(context), list(PROMPT)
        for _ in range(n_tokens):
            tokens.append(int(session.score(tokens)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("write", DECODERS)
def test_a_random_model_is_lively_and_its_siblings_resemble_it(
    write: Writer, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf")
    assert path.stat().st_size < 2**20
    assert write(tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    text = greedy(path, 120)
    assert len(set(text[len(PROMPT) :])) > 10
    rows = rows_of(path, text)
    assert 1.5 < rows.std() < 6.0
    choices = rows.argmax(axis=1)
    one, other = (rows_of(path, [1, x, *text[:20]])[-1] for x in tiny.SPM.spell("xy"))
    assert np.abs(one - other).max() > 0.05, "an early token shows in late logits"

    def agreement(**how: Any) -> float:
        sibling = write(tmp_path / "sibling.gguf", **how)
        return float((rows_of(sibling, text).argmax(axis=1) == choices).mean())

    assert agreement(seed=1) < 0.1
    assert 0.3 < agreement(perturb=0.05) < 0.95


def test_tokens_of_a_mixture_have_experts_of_their_own(tmp_path: Path) -> None:
    tokens = tiny.SPM.spell("what the model says")
    ranked = ranked_experts(tiny.write_moe(tmp_path / "model.gguf"), tokens, 16)
    for layer in np.sort(ranked[:, :, :2], axis=2):
        assert len(np.unique(layer, axis=0)) > len(tokens) // 2


def test_no_random_model_chooses_a_control_token(tmp_path: Path) -> None:
    vocab = tiny.spm_vocab(control=("<|im_end|>",)).with_size(450)
    rows = rows_of(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab), PROMPT)
    silent = [0, 1, 2, vocab.id_of("<|im_end|>"), *range(390, 450)]
    assert not rows[:, silent].any()


def test_a_script_cannot_fork(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two successors"):
        tiny.write_scripted(tmp_path / "model.gguf", tiny.SPM.spell("abac"))


# Planted tables


def glm(path: Path, table: Table) -> Path:
    return tiny_heads.write_glm4moe(path, table, Head(table=table))


def qwen(path: Path, table: Table) -> Path:
    return tiny_heads.write_qwen35(path, table, Head(table=table))


def step(path: Path, table: Table) -> Path:
    return tiny_heads.write_step35(path, table, [Head(table=table)] * 2)


@pytest.mark.parametrize(
    ("write", "table"),
    [
        *((write, TABLES[1]) for write in (glm, qwen, step, tiny_heads.write_gemma4)),
        *((tiny_heads.write_llama_table, table) for table in TABLES),
        (qwen, Table(n_classes=4, n_markers=5)),  # it remembers the last marker
    ],
)
def test_a_target_computes_its_table(
    write: Callable[[Path, Table], Path], table: Table, tmp_path: Path
) -> None:
    tokens = np.random.default_rng(5).choice(table.spoken, 100).tolist()
    rows = rows_of(write(tmp_path / "target.gguf", table), tokens)
    for n in (2, 3, 4, 50, 99, 100):
        assert rows[n - 1] == pytest.approx(table.logits(tokens[:n]), abs=0.1)


def test_a_head_is_wrong_after_the_planned_share_of_tokens() -> None:
    table = Table()
    head = Head(table=table, right=0.75)
    is_right = [head.drafted([1, x], 1) == table.greedy([1, x], 1) for x in table.spoken]
    assert np.mean(is_right) == pytest.approx(0.75, abs=0.01)
