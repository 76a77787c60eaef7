"""llama-cpp-python's own loop: the same text with its lookup, and counts that add up."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import lora
import pytest
import tiny
from greedy import assert_same

import ggufspec
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OutOfMemoryError
from ggufspec.llama.python_llama import (
    BaselineRequest,
    BaselineText,
    PythonLlama,
    n_logits_bytes,
    rounded_context,
)
from ggufspec.models.adapters import Adapter

GREEDY = Sampling(temperature=0)


def _python(path: Path, n_drafted: int, n_ctx: int = 256) -> PythonLlama:
    return PythonLlama(path, n_ctx=n_ctx, n_threads=1, n_gpu_layers=0, n_drafted=n_drafted)


def _write(
    llama: PythonLlama, prompt: list[int], *, n_tokens: int, ignore_eos: bool
) -> BaselineText:
    return llama.write(BaselineRequest(prompt, GREEDY, n_tokens, 0, ignore_eos))


def test_lookup_writes_what_plain_writes_and_counts_its_drafts(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abcdefg")
    path = tiny.write_scripted(tmp_path / "model.gguf", script)
    how: dict[str, Any] = {"n_tokens": 40, "ignore_eos": True}
    with closing(_python(path, 0)) as plain, closing(_python(path, 4)) as lookup:
        for prompt in ([1, script[0]], [1, *script, script[0]]):
            wanted, found = (_write(each, prompt, **how) for each in (plain, lookup))
            assert found.tokens == wanted.tokens
            assert list(wanted.tokens[:7]) == [*script[1:], script[0]]
            assert (wanted.n_generated, found.n_generated) == (40, 40)
            assert (wanted.n_drafted, wanted.n_accepted) == (0, 0)
            assert wanted.generation_seconds > 0 < wanted.prompt_seconds
    # The whole text is behind the second prompt: 41 tokens are one, and rounds of five.
    assert (found.n_drafted, found.n_accepted) == (32, 32)


def test_a_lookup_that_fails_is_not_accepted(tmp_path: Path) -> None:
    # The draft repeats what came behind the last two tokens; the model does not.
    script = [*tiny.SPM.spell("abcd"), *tiny.SPM.spell("efgh")]
    prompt = [1, script[0], script[1], 60, 61, script[0]]
    path = tiny.write_scripted(tmp_path / "model.gguf", script, then=tiny.SPM.eos)
    with closing(_python(path, 3)) as lookup:
        found = _write(lookup, prompt, n_tokens=3, ignore_eos=True)
    assert list(found.tokens) == script[1:5]
    assert found.n_drafted == 3
    assert found.n_accepted == 0


def test_a_text_of_llama_cpp_python_ends(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abc")
    path = tiny.write_scripted(tmp_path / "model.gguf", script, then=tiny.SPM.eos)
    with closing(_python(path, 2)) as lookup:
        found = _write(lookup, [1, script[0]], n_tokens=40, ignore_eos=False)
        assert list(found.tokens) == [*script[1:], tiny.SPM.eos]
        long = [1, *itertools.islice(itertools.cycle(script), 199)]
        full = _write(lookup, long, n_tokens=100, ignore_eos=True)
        assert full.n_generated == 56, "the context is full"


def test_a_lookup_goes_on_behind_the_first_batch(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abcdefg")
    path = tiny.write_scripted(tmp_path / "model.gguf", script)
    prompt = [1, *itertools.islice(itertools.cycle(script), 700)]
    with closing(_python(path, 4, n_ctx=1024)) as lookup:
        found = _write(lookup, prompt, n_tokens=14, ignore_eos=True)
    assert list(found.tokens) == [*(script * 3)[:15]]
    assert found.n_accepted > 7


def test_the_logits_of_a_llama_with_a_draft() -> None:
    assert rounded_context(256) == 256
    assert rounded_context(300) == 512
    assert n_logits_bytes(8192, 128_000) == 8192 * 128_000 * 4


def test_llama_cpp_python_that_cannot_load_says_so(tmp_path: Path) -> None:
    path = tiny.truncate(tiny.write_llama(tmp_path / "model.gguf"), 0.5)
    with pytest.raises(OutOfMemoryError, match="cannot load"):
        _python(path, 0)


def test_it_applies_an_adapter(target: Path, tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf")
    engine = ggufspec.load(target, lora=[(file, 0.5)], n_threads=1, n_ctx=256, tuned=False)
    llama = PythonLlama(
        target, n_ctx=256, n_threads=1, n_gpu_layers=0, n_drafted=0, adapter=Adapter(file, 0.5)
    )
    with engine, closing(llama):
        prompt = [1, 300, 301]
        found = _write(llama, prompt, n_tokens=20, ignore_eos=True).tokens[:20]
        wanted = engine.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True).tokens
        assert_same(engine, prompt, found, wanted)
