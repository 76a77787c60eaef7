"""Gemma 4 assistants: heads that read the target's KV cache and have none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_heads
from tiny_heads import SMALL, Head, Table

import ggufspec
from ggufspec.decoding.types import Logits
from ggufspec.engine.engine import Engine
from ggufspec.errors import NoRoomError
from ggufspec.llama.context import Context, ContextOptions, HeadLink
from ggufspec.llama.head import Head as HeadOf
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.models.header import read_header
from ggufspec.models.heads import head_of

TABLE = Table(n_classes=4)
N_CTX, N_DRAFT = 192, 7
F32 = gguf.GGMLQuantizationType.F32


def written(folder: Path, head: Head) -> tuple[Path, Path]:
    return (
        tiny_heads.write_gemma4(folder / "gemma.gguf", head.table),
        tiny_heads.write_gemma4_assistant(folder / "mtp-gemma.gguf", head),
    )


def loaded(folder: Path, head: Head, *, n_slots: int = 1, n_draft_max: int = 8) -> Engine:
    target, draft = written(folder, head)
    threads = {"n_threads": 1, "n_threads_draft": 1}
    return ggufspec.load(
        target, draft, n_ctx=N_CTX, n_slots=n_slots, n_draft_max=n_draft_max, tuned=False, **threads
    )


@pytest.fixture(scope="module", params=["hidden", "attention"])
def head(request: pytest.FixtureRequest) -> Head:
    return Head(table=TABLE, right=0.75, sees=request.param)


@pytest.fixture(scope="module")
def engine(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with loaded(tmp_path_factory.mktemp("pair"), head) as engine:
        yield engine


def prompt_of(n_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).choice(TABLE.spoken, n_tokens).tolist()


@pytest.mark.parametrize("n_draft", range(1, 9))
def test_greedy_text_is_the_targets(engine: Engine, n_draft: int) -> None:
    prompt = prompt_of(5, n_draft)
    found = engine.generate(prompt, max_tokens=80, temperature=0, n_draft=n_draft)
    assert list(found.tokens) == TABLE.greedy(prompt, 80)
    assert 0 < found.stats.n_accepted < found.stats.n_drafted


def test_an_exact_head_is_always_right(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    with loaded(tmp_path, Head(table=TABLE)) as engine:
        for temperature in (0.0, 1.0):
            stats = engine.generate(
                prompt, max_tokens=60, temperature=temperature, n_draft=4, seed=1
            ).stats
            assert stats.n_accepted == stats.n_drafted > 40


def test_a_conversation_goes_on(engine: Engine) -> None:
    text = prompt_of(30)
    for turn in range(3):
        found = engine.generate(text, max_tokens=30, temperature=0, n_draft=3)
        assert list(found.tokens) == TABLE.greedy(text, 30)
        assert found.stats.n_accepted > 0
        text = [*text, *found.tokens[: 30 - 10 * turn], *prompt_of(4, turn)]


def test_two_slots_draft_side_by_side(head: Head, tmp_path: Path) -> None:
    prompts = [prompt_of(n, n) for n in (3, 60, 20)]
    with loaded(tmp_path, head, n_slots=2) as engine:
        found = engine.generate_batch(prompts, max_tokens=60, temperature=0, n_draft=4)
    assert [list(each.tokens) for each in found] == [TABLE.greedy(prompt, 60) for prompt in prompts]
    assert all(0 < each.stats.n_accepted < each.stats.n_drafted for each in found)


def test_a_text_fills_the_context(engine: Engine) -> None:
    prompt = prompt_of(N_CTX - 12)
    found = engine.generate(prompt, max_tokens=40, temperature=0, n_draft=8)
    assert list(found.tokens) == TABLE.greedy(prompt, 12)
    assert found.stats.n_accepted


def test_costs_are_measured_beside_the_targets_cells(engine: Engine) -> None:
    prompt = prompt_of(9)
    found = engine.generate(prompt, max_tokens=60, temperature=0)
    assert list(found.tokens) == TABLE.greedy(prompt, 60)


class Pair:
    """A target and its assistant, whose logits depend on all that is read."""

    def __init__(self, target: Path, draft: Path, n_batch: int, n_sequences: int = 1) -> None:
        facts = head_of(read_header(target), read_header(draft))
        assert facts is not None
        with ExitStack() as stack:
            models = [
                stack.enter_context(closing(Model(target))),
                stack.enter_context(closing(Model(draft, mtp=True, is_head=True))),
            ]
            options = ContextOptions(
                n_ctx=N_CTX,
                n_rows=N_DRAFT + 1,
                n_sequences=n_sequences,
                n_batch=n_batch,
                n_threads=1,
                flash_attention="off",
                type_k="f32",
                type_v="f32",
            )
            context = stack.enter_context(closing(Context(models[0], options)))
            link = HeadLink(context, facts)
            self.context = stack.enter_context(
                closing(Context(models[1], replace(options, n_rows=1), head=link))
            )
            self.heads = HeadOf(link, self.context).sessions
            self.targets = [LlamaSession(context, i) for i in range(n_sequences)]
            self.close = stack.pop_all().close

    def fresh(self, text: list[int], drafted: list[int]) -> Logits:
        """The head's logits where nothing else was read before."""
        self.targets[0].forget()
        self.heads[0].forget()
        self.targets[0].feed(text[:-1])
        return self.heads[0].score([*text, *drafted]).copy()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    paths = written(tmp_path_factory.mktemp("noisy"), Head(table=TABLE, sees="attention"))
    random = np.random.default_rng(1)
    for path in paths:
        reader = gguf.GGUFReader(path, "r+")
        for tensor in reader.tensors:
            if "attn_q_norm" in tensor.name:
                tensor.data[...] *= 0.02  # attention to all cells, not to a single one
            elif "post_" in tensor.name:
                tensor.data[...] += np.float32(0.05)
            elif tensor.tensor_type == F32 and "norm" not in tensor.name:
                tensor.data[...] += random.normal(0, 0.03, tensor.data.shape).astype(np.float32)
        reader.data.flush()
    return paths


@pytest.mark.parametrize("seed", range(3))
def test_its_logits_depend_on_the_text_only(noisy: tuple[Path, Path], seed: int) -> None:
    draw = random.Random(seed)
    with closing(Pair(*noisy, n_batch=N_CTX)) as oracle, closing(Pair(*noisy, 12, 2)) as pair:
        texts = [prompt_of(draw.randint(2, 40), i) for i in range(2)]
        for i in range(2):
            pair.targets[i].feed(texts[i][:-1])
        for step in range(24):
            i = draw.randrange(2)
            text, drafted = texts[i], list[int]()
            for _ in range(draw.randint(0, N_DRAFT)):
                found = pair.heads[i].score([*text, *drafted]).copy()
                assert np.abs(found - oracle.fresh(text, drafted)).max() < 4e-3
                drafted.append(
                    int(found.argmax()) if draw.random() < 0.5 else prompt_of(1, step)[0]
                )
            pair.targets[i].score(text, drafted)
            n = draw.randint(0, len(drafted))
            texts[i] = [*text, *drafted[:n], *prompt_of(1, 100 + step)]
            if draw.random() < 0.2 or len(texts[i]) > N_CTX - 20:  # another turn
                texts[i] = [*texts[i][: draw.randint(0, 60)], *prompt_of(draw.randint(2, 30), step)]
                pair.targets[i].feed(texts[i][:-1])


def test_a_state_that_is_missing_leaves_the_round_to_the_target(noisy: tuple[Path, Path]) -> None:
    with closing(Pair(*noisy, n_batch=N_CTX)) as pair:
        text = prompt_of(20)
        for missing in (text[:1], text):
            with pytest.raises(NoRoomError):
                pair.heads[0].score(missing)
        pair.targets[0].score(text)
        assert pair.heads[0].score([*text, 40]).shape == (1, len(TABLE.vocab))


def test_the_distribution_is_the_targets(tmp_path: Path) -> None:
    """Each rank of the target's likeliest tokens is drawn as often as it is probable."""
    table = Table(n_classes=2, vocab=SMALL, gap=1.0, bonus=1.0)
    head = Head(table=table, right=0.5, noise=1.0, sees="attention")
    prompt, n_drafted, n_accepted = table.spoken[:3].tolist(), 0, 0
    drawn, wanted, variance = np.zeros((3, len(table.vocab)))
    with loaded(tmp_path, head) as engine:
        for seed in range(25):
            found = engine.generate(
                prompt,
                max_tokens=150,
                n_draft=3,
                seed=seed,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
            )
            n_drafted += found.stats.n_drafted
            n_accepted += found.stats.n_accepted
            for i, token in enumerate(found.tokens):
                probs = softmax(table.logits([*prompt, *found.tokens[:i]]))
                ranked = np.argsort(-probs)
                drawn[np.flatnonzero(ranked == token)] += 1
                wanted += probs[ranked]
                variance += probs[ranked] * (1 - probs[ranked])
    assert 0.2 < n_accepted / n_drafted < 0.8
    assert np.abs((drawn - wanted) / np.sqrt(variance))[wanted > 20].max() < 4.5


def softmax(logits: Logits) -> Logits:
    weights: Logits = np.exp(logits - logits.max())
    return weights / weights.sum()
