"""A full context goes on without the older half of the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_blocks
import tiny_heads

import ggufspec

N_CTX = 64
PROMPT = list(range(3, 23))
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    table = tiny_heads.Table(vocab=tiny_blocks.SMALL_WITH_MASK, n_classes=2)
    head = tiny_blocks.BlockHead(table=table, block_size=6, right=0.7)
    return {
        "llama": tiny.write_llama(folder / "llama.gguf"),
        "small": tiny.write_llama(folder / "small.gguf", seed=1),
        "hybrid": tiny.write_hybrid(folder / "hybrid.gguf"),
        "table": tiny_heads.write_llama_table(folder / "table.gguf", table),
        "dflash": tiny_blocks.write_dflash(folder / "dflash.gguf", head),
    }


def shifted(engine: ggufspec.Engine, prompt: list[int], n_tokens: int, n_keep: int) -> list[int]:
    """What plain generations write, each with what is left of the text as its prompt."""
    text, written = list(prompt), list[int]()
    while len(written) < n_tokens:
        n = min(N_CTX - len(text), n_tokens - len(written))
        done = engine.generate(text, max_tokens=n, drafter="none", **GREEDY)
        text += done.tokens
        written += done.tokens
        n_dropped = (len(text) - n_keep) // 2
        del text[n_keep : n_keep + n_dropped]
    return written


@pytest.fixture(params=[("llama", "small"), ("hybrid", "llama"), ("table", "dflash")], ids="-".join)
def pair(request: pytest.FixtureRequest, files: dict[str, Path]) -> tuple[Path, Path]:
    target, draft = request.param
    return files[target], files[draft]


@pytest.mark.parametrize(("n_keep", "kept"), [(-1, len(PROMPT)), (1000, N_CTX // 2)])
def test_a_shifted_text_is_that_of_the_model_after_what_is_left(
    pair: tuple[Path, Path], n_keep: int, kept: int
) -> None:
    target, draft = pair
    at = {"n_ctx": N_CTX, "n_threads": 1}
    with ggufspec.load(target, **at) as plain, ggufspec.load(target, draft, **at) as drafting:
        wanted = shifted(plain, PROMPT, 3 * N_CTX, kept)
        how = {"max_tokens": 3 * N_CTX, "context_shift": True, "n_keep": n_keep, **GREEDY}
        done = drafting.generate(PROMPT, n_draft=4, **how)
        assert list(done.tokens) == wanted
        assert (done.finish_reason, done.stats.n_drafted > 0) == ("length", True)


@pytest.fixture
def engine(files: dict[str, Path]) -> Iterator[ggufspec.Engine]:
    with ggufspec.load(files["llama"], files["small"], n_ctx=N_CTX, n_slots=2, n_threads=1) as made:
        yield made


def test_without_a_number_of_tokens_a_text_goes_on(engine: ggufspec.Engine) -> None:
    with engine.stream(PROMPT, context_shift=True, **GREEDY) as stream:
        written = 0
        for chunk in stream:
            written += len(chunk.tokens)
            if written > 5 * N_CTX:
                break


def test_texts_in_slots_are_shifted_one_by_one(engine: ggufspec.Engine) -> None:
    prompts = [PROMPT, PROMPT[:7]]
    how: dict[str, Any] = {"context_shift": True, "n_keep": 4, "max_tokens": 2 * N_CTX, **GREEDY}
    alone = [engine.generate(prompt, **how).tokens for prompt in prompts]
    together = [done.tokens for done in engine.generate_batch(prompts, **how)]
    assert together == alone


@pytest.mark.parametrize("bound", [{"regex": "[a-z]{300}"}, {"min_tokens": 3}])
def test_texts_with_a_constraint_end_as_without_it(
    engine: ggufspec.Engine, bound: dict[str, Any]
) -> None:
    greedy = {"temperature": 0, "max_tokens": 3 * N_CTX}
    done = engine.generate(PROMPT, context_shift=True, **greedy, **bound)
    assert len(done.tokens) <= N_CTX - len(PROMPT)
