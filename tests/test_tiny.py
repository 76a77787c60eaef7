"""What the random tiny models promise to the other tests, which could not fail without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from experts import ranked_experts

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
def test_a_random_model_is_small_lively_and_the_same_each_time(
    write: Writer, tmp_path: Path
) -> None:
    start = time.thread_time()
    path = write(tmp_path / "a.gguf")
    assert time.thread_time() - start < 0.3
    assert path.stat().st_size < 2**20
    assert write(tmp_path / "b.gguf").read_bytes() == path.read_bytes()
    text = greedy(path, 20)
    assert len(set(text[len(PROMPT) :])) > 5
    rows = rows_of(path, text)
    assert np.isfinite(rows).all()
    assert np.array_equal(rows, rows_of(path, text))
    assert rows[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() == text[len(PROMPT) :]
    assert 1.5 < rows.std() < 6.0


@pytest.mark.parametrize("write", DECODERS)
def test_an_early_token_shows_in_late_logits(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    rest = tiny.SPM.spell("what the model says")
    one, other = (rows_of(path, [1, first, *rest])[-1] for first in tiny.SPM.spell("xy"))
    assert np.abs(one - other).max() > 0.05


@pytest.mark.parametrize("write", DECODERS)
def test_seeds_differ_and_noise_leaves_a_resemblance(write: Writer, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    text = greedy(path, 120)
    choices = rows_of(path, text).argmax(axis=1)

    def agreement(**how: Any) -> float:
        sibling = write(tmp_path / "sibling.gguf", **how)
        return float((rows_of(sibling, text).argmax(axis=1) == choices).mean())

    assert agreement(seed=1) < 0.1
    assert 0.3 < agreement(perturb=0.05) < 0.95


def test_tokens_of_a_mixture_have_experts_of_their_own(tmp_path: Path) -> None:
    tokens = tiny.SPM.spell("what the model says")
    ranked = ranked_experts(tiny.write_moe(tmp_path / "model.gguf"), tokens, 16)
    assert ranked.shape == (2, len(tokens), 16)
    for layer in np.sort(ranked[:, :, :2], axis=2):
        assert len(np.unique(layer, axis=0)) > len(tokens) // 2
        assert len(np.unique(layer)) > 4


def test_sharpness_peaks_the_distribution(tmp_path: Path) -> None:
    flat, sharp = (
        rows_of(tiny.write_llama(tmp_path / f"{sharpness}.gguf", sharpness=sharpness), PROMPT)
        for sharpness in (1.0, 4.0)
    )
    assert sharp == pytest.approx(4.0 * flat, rel=1e-4, abs=1e-4)


def test_no_random_model_chooses_a_control_token(tmp_path: Path) -> None:
    vocab = tiny.spm_vocab(control=("<|im_end|>",)).with_size(450)
    rows = rows_of(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab), PROMPT)
    silent = [0, 1, 2, vocab.id_of("<|im_end|>"), *range(390, 450)]
    assert not rows[:, silent].any()


def test_a_script_cannot_fork(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two successors"):
        tiny.write_scripted(tmp_path / "model.gguf", tiny.SPM.spell("abac"))


def test_padding_changes_no_other_logit(tmp_path: Path) -> None:
    n_vocab = len(tiny.SPM)
    padded = tiny.write_llama(tmp_path / "b.gguf", vocab=tiny.SPM.with_size(n_vocab + 64))
    rows = rows_of(tiny.write_llama(tmp_path / "a.gguf"), PROMPT)
    assert np.array_equal(rows_of(padded, PROMPT)[:, :n_vocab], rows)
