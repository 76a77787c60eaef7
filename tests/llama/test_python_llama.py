"""llama-cpp-python's own loop as a baseline."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

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
    rounded_context,
)
from ggufspec.models.adapters import Adapter


def _python(path: Path, adapter: Adapter | None = None) -> PythonLlama:
    return PythonLlama(path, n_ctx=256, n_threads=1, n_gpu_layers=0, adapter=adapter)


def _write(llama: PythonLlama, prompt: list[int], n_tokens: int, **how: bool) -> BaselineText:
    return llama.write(BaselineRequest(prompt, Sampling(temperature=0), n_tokens, 0, **how))


def test_a_text_ends_at_its_end_token_or_at_the_end_of_the_context(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abc")
    path = tiny.write_scripted(tmp_path / "model.gguf", script, then=tiny.SPM.eos)
    with closing(_python(path)) as llama:
        found = _write(llama, [1, script[0]], 40, ignore_eos=False)
        assert list(found.tokens) == [*script[1:], tiny.SPM.eos]
        assert (found.n_prompt, found.n_generated, found.n_drafted) == (2, 2, 0)
        assert found.generation_seconds > 0 < found.prompt_seconds
        long = [1, *itertools.islice(itertools.cycle(script), 199)]
        assert _write(llama, long, 100, ignore_eos=True).n_generated == 56, "the context is full"


def test_contexts_are_rounded_as_llama_cpp_does() -> None:
    assert [rounded_context(n) for n in (256, 300)] == [256, 512]


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    path = tiny.truncate(tiny.write_llama(tmp_path / "model.gguf"), 0.5)
    with pytest.raises(OutOfMemoryError, match="cannot load"):
        _python(path)


def test_it_applies_an_adapter(target: Path, tmp_path: Path) -> None:
    file = lora.write_lora(tmp_path / "lora.gguf")
    engine = ggufspec.load(target, lora=[(file, 0.5)], n_threads=1, n_ctx=256, tuned=False)
    with engine, closing(_python(target, Adapter(file, 0.5))) as llama:
        prompt = [1, 300, 301]
        found = _write(llama, prompt, 20, ignore_eos=True).tokens[:20]
        wanted = engine.generate(prompt, max_tokens=20, temperature=0, ignore_eos=True).tokens
        assert_same(engine, prompt, found, wanted)
