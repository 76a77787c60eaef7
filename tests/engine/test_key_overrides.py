"""Replaced values of a header, and rope scaling: llama.cpp's text with the same, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny

import ggufspec
from ggufspec.errors import OptionError
from ggufspec.measure.pairs import profile_key

HOW: dict[str, Any] = {"n_threads": 1, "n_ctx": 256, "tuned": False}


def text_of(target: Path, draft: Path | None = None, **options: Any) -> list[int]:
    with ggufspec.load(target, draft, **HOW, **options) as engine:
        return list(engine.generate("hello world", max_tokens=12, temperature=0).tokens)


def own_text(target: Path, **options: Any) -> list[int]:
    """Greedy tokens by llama-cpp-python alone."""
    model = llama_cpp.Llama(
        str(target), n_ctx=256, n_threads=1, n_gpu_layers=0, verbose=False, **options
    )
    tokens = model.tokenize(b"hello world", special=True)
    found = []
    for token in model.generate(tokens, temp=0, repeat_penalty=1.0):
        found.append(token)
        if len(found) == 12:
            break
    model.close()
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"rope_scale": 8.0}, {"rope_freq_scale": 1 / 8}),
        ({"rope_freq_scale": 0.125}, {"rope_freq_scale": 1 / 8}),
        ({"rope_freq_base": 20.0}, {"rope_freq_base": 20.0}),
        (
            {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 64},
            {"rope_scaling_type": 2, "rope_freq_scale": 1 / 4, "yarn_orig_ctx": 64},
        ),
        (
            {"override_kv": ["llama.attention.layer_norm_rms_epsilon=float:0.5"]},
            {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 0.5}},
        ),
    ],
    ids=lambda options: "-".join(options),
)
def test_the_text_is_that_of_llama_cpp_with_the_same_values(
    ours: dict[str, Any], theirs: dict[str, Any], target: Path, draft: Path
) -> None:
    wanted = own_text(target, **theirs)
    assert text_of(target, **ours) == wanted
    assert text_of(target, draft, n_draft_max=4, **ours) == wanted
    assert wanted != text_of(target)


def test_a_value_of_its_own_has_priority_over_rope_options(target: Path) -> None:
    key = "llama.rope.scaling.factor"
    with ggufspec.load(target, rope_scale=8.0, override_kv=[f"{key}=float:2"], **HOW) as engine:
        assert [*map(str, engine.pair.target.model.key_overrides)] == [f"{key}=float:2.0"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("llama.rope.freq_base=double:1", "must be KEY=TYPE:VALUE"),
        ("llama.rope.freq_base=float:nan", "'nan' is no float"),
        ("llama.context_length=int:9223372036854775808", "is no int"),
        ("llama.context_length=int:0", "must be from 1 to"),
        ("tokenizer.ggml.add_bos_token=bool:1", "'1' is no bool"),
        ("tokenizer.ggml.eos_token_id=int:100000", "must be from 0 to"),
        ("general.name=str:" + 128 * "x", "at most 127 bytes"),
        ("llama.attention.layer_norm_rms_epsilon=int:1", "this key is float"),
        ("llama.attention.layer_norm_rms_epsilon=float:-1", "must be from 0 to"),
        ("llama.attention.head_count=int:0", "cannot be replaced"),
        ("llama.rope.scaling.type=str:wide", "is none of none, linear"),
        ("llama.expert_used_count=int:2", "must be from 1 to 0"),
    ],
)
def test_what_llama_cpp_would_ignore_or_abort_at_is_refused(
    given: str, said: str, target: Path
) -> None:
    with pytest.raises(OptionError, match=said):
        text_of(target, override_kv=[given])


@pytest.mark.parametrize(
    "options", [{"rope_scaling": "wide"}, {"rope_freq_base": float("inf")}, {"yarn_orig_ctx": 0}]
)
def test_wrong_values_are_refused(options: dict[str, Any], target: Path) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        text_of(target, **options)


def test_more_experts_are_used_and_counted(tmp_path: Path) -> None:
    model = tiny.write_moe(tmp_path / "mixture.gguf", n_experts=4, n_used=2)
    with ggufspec.load(model, override_kv=["qwen3moe.expert_used_count=int:3"], **HOW) as engine:
        assert engine.pair.target.model.experts == (4, 3)
    with pytest.raises(OptionError, match="must be from 1 to 4"):
        ggufspec.load(model, override_kv=["qwen3moe.expert_used_count=int:5"], **HOW)


def test_what_costs_or_texts_depend_on_is_in_the_key(target: Path) -> None:
    keys = []
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"repack": False},
        {"rope_scale": 2.0},
        {"rope_scale": 4.0},
    )
    for way in ways:
        with ggufspec.load(target, **HOW, **way) as engine:
            keys.append(profile_key(engine.pair.target))
            assert not way.keys() & {"repack"} or not engine.pair.target.model.kernels.types
    assert all(keys.count(key) == 1 for key in keys)
    with ggufspec.load(target, **HOW, op_offload=False) as engine:
        assert profile_key(engine.pair.target) == keys[0], "drafts are too short to be offloaded"
