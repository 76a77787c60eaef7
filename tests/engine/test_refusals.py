"""Options and prompts that cannot be used are refused with a reason before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError, PromptError


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tiny.write_llama(tmp_path_factory.mktemp("models") / "target.gguf")
    with ggufspec.load(path, n_threads=1, tuned=False) as made:
        yield made


LOAD: list[tuple[dict[str, Any], str]] = [
    ({"n_ctx": -1}, "n_ctx is -1; it must be from 0 to"),
    ({"n_ctx": "most"}, "n_ctx is 'most'; it must be a whole number"),
    ({"n_ctx_draft": 0}, "n_ctx_draft is 0; it must be from 1"),
    ({"n_batch": 2.5}, "n_batch is 2.5"),
    ({"n_draft_max": 1000}, "n_draft_max is 1000; it must be from 1 to"),
    ({"n_slots": 65}, "n_slots is 65"),
    ({"n_threads": 0}, "n_threads is 0"),
    ({"cache_ram": 2**31}, "cache_ram is 2147483648; it must be from 0 to"),
    ({"ctx_checkpoints": None}, "ctx_checkpoints"),
    ({"n_gpu_layers": "most"}, "n_gpu_layers is 'most'; it must be a whole number, or 'auto'"),
    ({"n_gpu_layers": 2**40}, "n_gpu_layers is 1099511627776; it must be from -2,147,483,647"),
    ({"n_gpu_layers_draft": True}, "n_gpu_layers_draft"),
    ({"tensor_split": [0, 0]}, "tensor_split"),
    ({"tensor_split": [1.0] * 500}, "tensor_split has 500 shares"),
    ({"main_gpu": "0"}, "main_gpu"),
    ({"n_cpu_moe": -2}, "n_cpu_moe is -2; it must be from -1 to 2,048"),
    ({"n_cpu_ffn_draft": 1.5}, "n_cpu_ffn_draft is 1.5; it must be a whole number"),
    ({"override_tensor": "exps=CPU"}, "override_tensor is 'exps=CPU'; it must be a list of texts"),
    ({"type_k": "q3"}, "type_k is 'q3'; it must be one of f32"),
    ({"type_v": "q3"}, "type_v"),
    ({"flash_attention": "maybe"}, "maybe"),
    ({"usual_text": (5,)}, "give the tokens of the prompt and of the answer"),
    ({"exact": 1}, "exact"),
    ({"mmap": "no"}, "mmap"),
    ({"mlock": 1}, "mlock"),
    ({"repack": None}, "repack"),
    ({"op_offload": 1}, "op_offload"),
    ({"tuned": "no"}, "tuned"),
    ({"progress": 5}, "progress"),
    ({"draft": 5}, "draft is 5; it must be"),
    ({"chat_template": b"a"}, "chat_template"),
    ({"chat_template": ""}, "the chat template is empty"),
    ({"chat_template": "{% if %}"}, "chat template is not valid"),
    ({"n_remembered": -1}, "n_remembered is -1; it must be from 0 to"),
    ({"draft_texts": "notes.txt"}, "it must be a list of files"),
    ({"draft_texts": [5]}, "an entry of draft_texts is 5"),
    ({"lora_draft": ["a.gguf"]}, "needs a draft model"),
    ({"rope_scale": 2, "rope_freq_scale": 0.5}, "rope_scale"),
    ({"override_kv": "llama.rope.freq_base=float:1"}, "override_kv"),
    ({"override_kv": ["llama.rope.freq_base=float:wide"]}, "'wide' is no float"),
]


@pytest.mark.parametrize(("options", "said"), LOAD, ids=lambda each: str(each)[:40])
def test_options_of_load(options: dict[str, Any], said: str, engine: Engine) -> None:
    with pytest.raises(OptionError, match=said):
        ggufspec.load(engine.pair.target.model.path, **options)


GENERATE: list[tuple[dict[str, Any], str]] = [
    # Numbers
    ({"n_draft": 0}, "n_draft is 0; it must be at least 1, or 'auto'"),
    ({"n_draft": 17}, "n_draft is 17, but this engine was loaded for at most 16"),
    ({"n_draft": "few"}, "n_draft is 'few'; it must be a whole number, or 'auto'"),
    ({"n_draft": 2.0}, "n_draft is 2.0"),
    ({"n_draft": True}, "must be a whole number"),
    ({"max_tokens": -1}, "max_tokens is -1; it must be at least 0"),
    ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
    ({"seed": "1"}, "seed is '1'"),
    ({"n_keep": 1.5}, "n_keep is 1.5"),
    ({"draft_temperature": "warm"}, "draft_temperature"),
    ({"draft_temperature": -1}, "draft_temperature is -1.0; it must be at least 0"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    # Names and switches
    ({"drafter": "oracle"}, "oracle"),
    ({"drafter": 5}, "drafter is 5; it must be a text"),
    ({"verify": "hope"}, "hope"),
    ({"verify": None}, "verify is None"),
    ({"tree": "sometimes"}, "tree is 'sometimes'; it must be one of auto"),
    ({"ignore_eos": "yes"}, "True or False"),
    ({"context_shift": 1}, "context_shift"),
    ({"progress": 5}, "progress"),
    ({"samplers": ("top_k", "infill")}, "'infill' is not supported"),
    # Stops and biases
    ({"stop": ["a", ""]}, "a text of stop is empty"),
    ({"stop": [1]}, "an entry of stop is 1"),
    ({"stop_tokens": ["a"]}, "a token of stop_tokens is 'a'"),
    ({"stop_tokens": [99999]}, "stop_tokens names token 99999; the vocabulary has"),
    ({"logit_bias": {99999: 1.0}}, "logit_bias names token 99999"),
    ({"dry_sequence_breakers": ":"}, "dry_sequence_breakers"),
    # Constraints
    ({"grammar": 'root ::= "a'}, "never closed"),
    ({"grammar": b"root"}, "grammar is b'root'; it must be a text"),
    ({"regex": "[a"}, "unclosed"),
    ({"regex": 5}, "regex is 5; it must be a text"),
    ({"choices": []}, "choices is empty"),
    ({"choices": "yes"}, "must be a list of texts"),
    ({"json_schema": {"type": "telepathy"}}, "telepathy"),
    ({"json_schema": int}, "json_schema is <class 'int'>; it must be"),
    ({"json_schema": [1]}, "it must be the text of a schema, a dict, or a pydantic model"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema and grammar are given"),
    ({"choices": ["a"], "ignore_eos": True}, "ignore_eos.*choices"),
    ({"regex": "a", "min_tokens": 5}, "min_tokens.*regex"),
    # Predictions
    ({"prediction": []}, "prediction is empty; give at least one token"),
    ({"prediction": 5}, "prediction is 5; it must be a list of token ids"),
    ({"prediction": [10**6]}, "token 1000000 of the prediction is outside the vocabulary"),
    ({"prediction": "ab " * 5000}, "shorten it, or load with a larger context"),
    ({"prediction": "ab", "drafter": "model"}, "the drafter 'model' uses no prediction"),
    # Samplers
    ({"mirostat": 3}, "mirostat is 3; it must be from 0 to 2"),
    ({"xtc_probability": 2}, "xtc_probability is 2"),
    ({"banned_strings": [""]}, "a text of banned_strings is empty"),
]


@pytest.mark.parametrize(("options", "said"), GENERATE, ids=lambda each: str(each)[:40])
def test_options_of_a_text(options: dict[str, Any], said: str, engine: Engine) -> None:
    with pytest.raises(OptionError, match=said):
        engine.stream("hi", **options)


def test_an_option_that_there_is_not_is_named(engine: Engine) -> None:
    with pytest.raises(TypeError, match="there is no option heat"):
        engine.stream("hi", heat=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "prompt", [[], [-1], [10**12], [1.5], [True], ["a"], b"Once", None, {"a": 1}], ids=str
)
def test_prompts(prompt: Any, engine: Engine) -> None:
    with pytest.raises(PromptError):
        engine.generate(prompt)
    with pytest.raises(PromptError):
        engine.generate_batch([[5], prompt], max_tokens=1)
    assert not sum(slot.is_used for slot in engine.pair.slots)


@pytest.mark.parametrize("prompts", [None, "hi", b"hi", {"hi": 1}])
def test_batches_that_are_no_list_of_prompts(engine: Engine, prompts: Any) -> None:
    with pytest.raises(PromptError, match="give a"):
        engine.generate_batch(prompts)


def test_other_models(engine: Engine, tmp_path: Path) -> None:
    target = engine.pair.target.model.path
    silent = tiny.write_llama(tmp_path / "draft.gguf", vocab=tiny.SILENT)
    with pytest.raises(ggufspec.VocabError, match="tokenizer is SPM, the draft's BPE"):
        ggufspec.load(target, silent)
    with pytest.raises(ggufspec.OutOfMemoryError, match="this machine has"):
        ggufspec.load(target, n_ctx=2_000_000_000)
    short = tmp_path / "short.gguf"
    short.write_bytes(target.read_bytes()[:20_000])
    with pytest.raises(ggufspec.ModelError, match="truncated"):
        ggufspec.load(short)
