"""Text that is written on a device is the text of the CPU, wherever the layers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_pairs
import numpy as np
import pytest
import tiny
from device.conftest import (
    ALL,
    ON_CPU,
    ON_DEVICE,
    PROMPTS,
    ROUNDING,
    LoadPair,
    assert_greedy,
    logits,
)

import ggufspec
from ggufspec.bench.audit import AuditOptions, audit

F16 = ROUNDING["f16"]
SPLITS = [(n, draft) for n in (0, 1, 3, ALL) for draft in (0, ALL)][1:]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "fixed": {"n_draft": 3},
    "auto": {"n_draft": "auto"},
    "tree": {"n_draft": 6, "tree": "on"},
}
LONG = "It was the best of times, it was the worst of times, " * 4
TOKENS = [40, 77, 90]  # of the tiny models
MORE_TOKENS = [40 + 7 * i % 200 for i in range(45)]


# The embedded pair


@pytest.mark.parametrize(
    ("whose", "n_together"), [("target", 1), ("target", 4), ("draft", 1)], ids=str
)
@pytest.mark.parametrize("n_layers", [0, 1, 3, ALL])
def test_logits_are_those_of_the_cpu(
    n_layers: int, whose: str, n_together: int, load: LoadPair
) -> None:
    """But for rounding, by which one sees that the device has computed them."""
    reference = load(**ON_CPU)
    engine = load(n_gpu_layers=n_layers, n_gpu_layers_draft=n_layers)
    for prompt in PROMPTS:
        text = list(reference.generate(prompt, drafter="none", **GREEDY).tokens)
        expected = logits(reference, prompt, text, whose=whose)
        found = logits(engine, prompt, text, n_together, whose)
        assert np.abs(found - expected).max() <= F16
        assert np.array_equal(found, expected) == (n_layers == 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n_layers", "n_draft_layers"), SPLITS)
def test_text_is_that_of_the_cpu(
    n_layers: int, n_draft_layers: int, way: str, load: LoadPair
) -> None:
    reference = load(**ON_CPU)
    engine = load(n_gpu_layers=n_layers, n_gpu_layers_draft=n_draft_layers)
    for prompt in PROMPTS:
        done = engine.generate(prompt, **WAYS[way], **GREEDY)
        assert len(done.tokens) == 16
        assert_greedy(done, reference, prompt, F16)
        if way in ("fixed", "tree"):
            assert 0 < done.stats.n_accepted <= done.stats.n_drafted


@pytest.mark.parametrize("n_layers", [0, 3, ALL])
def test_a_long_prompt_and_a_second_turn(n_layers: int, load: LoadPair) -> None:
    """Also with no layer on the device, which then gets passes over many tokens."""
    reference = load(**ON_CPU, n_batch=16)  # too few for that
    engine = load(n_gpu_layers=n_layers, n_gpu_layers_draft=ALL)
    prompt = engine.tokenize(LONG)
    assert len(prompt) > 32
    for added in ("", " And then"):
        prompt += engine.vocab.tokenize(added, add_special=False, parse_special=False)
        done = engine.generate(prompt, n_draft=3, **GREEDY)
        assert_greedy(done, reference, prompt, F16)
        prompt += done.tokens
    assert done.stats.n_prompt_reused > 32


@pytest.mark.parametrize("flash_attention", ["auto", "on", "off"])
@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("n_layers", [3, ALL])
def test_kv_types_and_flash_attention(
    n_layers: int, kind: str, flash_attention: str, load: LoadPair
) -> None:
    how = {"type_k": kind, "type_v": kind, "flash_attention": flash_attention}
    if flash_attention == "off" and kind != "f16":
        with pytest.raises(ggufspec.OptionError, match="need flash attention"):
            load(n_gpu_layers=n_layers, **how)
        return
    engine = load(n_gpu_layers=n_layers, n_gpu_layers_draft=ALL, **how)
    done = engine.generate(PROMPTS[0], n_draft=3, **GREEDY)
    assert_greedy(done, load(**ON_CPU, **how), PROMPTS[0], ROUNDING[kind])
    assert done.stats.n_accepted > 0


def test_exact_text_is_equal_with_and_without_drafts(load: LoadPair) -> None:
    engine = load(**ON_DEVICE, exact=True, n_slots=2)
    plain = [engine.generate(prompt, drafter="none", **GREEDY).tokens for prompt in PROMPTS]
    together = engine.generate_batch(PROMPTS, n_draft=3, **GREEDY)
    assert [done.tokens for done in together] == plain


def test_sampled_text_has_the_distribution_of_the_target(load: LoadPair) -> None:
    engine = load(n_gpu_layers=3, n_gpu_layers_draft=ALL)
    settings = AuditOptions(n_runs=4, n_tokens=8, n_draft=3, seed=0)
    assert audit(engine, PROMPTS, settings).differences == ()


# Other architectures, and heads

Writer = Callable[..., Path]


@pytest.mark.parametrize(
    "writer", [tiny.write_swa, tiny.write_mamba, tiny.write_hybrid, tiny.write_qwen35]
)
@pytest.mark.parametrize(("n_layers", "n_draft_layers"), [(ALL, 0), (2, ALL)])
def test_states_and_windows(
    writer: Writer, n_layers: int, n_draft_layers: int, tmp_path: Path
) -> None:
    """What cannot drop a tail goes back to a checkpoint, or to a state that llama.cpp kept."""
    target = writer(tmp_path / "target.gguf")
    draft = writer(tmp_path / "draft.gguf", perturb=0.3)
    common = {"n_ctx": 128, "n_batch": 20, "tuned": False}
    split = {"n_gpu_layers": n_layers, "n_gpu_layers_draft": n_draft_layers}
    with (
        ggufspec.load(target, draft, **common, **split) as engine,
        ggufspec.load(target, **common, **ON_CPU) as reference,
    ):
        for prompt in (TOKENS, MORE_TOKENS):
            done = engine.generate(prompt, n_draft=3, **GREEDY)
            assert_greedy(done, reference, prompt, F16)
            assert done.stats.n_accepted < done.stats.n_drafted


@pytest.mark.parametrize("kind", ["glm4moe", "sidecar", "qwen35", "eagle3", "eagle3_own", "gemma4"])
@pytest.mark.parametrize(("n_layers", "n_head_layers"), [(ALL, ALL), (ALL, 0), (0, ALL), (1, ALL)])
def test_heads_draft_what_the_target_writes(
    kind: str, n_layers: int, n_head_layers: int, tmp_path: Path
) -> None:
    """A head reads hidden states, the output or the cache of its target, on whichever device."""
    pair = head_pairs.WRITERS[kind](tmp_path)
    split = {"n_gpu_layers": n_layers, "n_gpu_layers_draft": n_head_layers}
    with ggufspec.load(pair.target, pair.draft, n_ctx=192, tuned=False, **split) as engine:
        for prompt in (TOKENS, MORE_TOKENS):
            done = engine.generate(prompt, drafter="model", n_draft=3, **GREEDY)
            assert list(done.tokens) == pair.table.greedy(prompt, 16)
            assert done.stats.n_accepted == done.stats.n_drafted > 0
