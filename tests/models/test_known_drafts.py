"""The list of known drafts: what is proposed for ten targets, as their headers describe them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub import Hub

from ggufspec.models.draft_proposal import known_drafts
from ggufspec.models.gguf_file import Tensor
from ggufspec.models.header import Header
from ggufspec.models.registry import Registry

NONE = Registry({}, {})
SMALL_QWEN3 = "Qwen/Qwen3-0.6B-GGUF:Q8_0"
TARGETS = [  # architecture, billions of parameters, size of the vocabulary, file
    (
        "qwen3",
        4.02,
        151_936,
        "Qwen3-4B-Q4_K_M.gguf",
        ["AtomicChat/Qwen3-4B-DFlash-GGUF:Q8_0", SMALL_QWEN3],
    ),
    (
        "qwen3",
        8.19,
        151_936,
        "Qwen3-8B-Q4_K_M.gguf",
        [
            "AtomicChat/Qwen3-8B-DFlash-GGUF:Q8_0",
            "williamliao/Qwen3-8B-EAGLE3-Speculator-GGUF:F16",
            SMALL_QWEN3,
        ],
    ),
    ("qwen3moe", 30.5, 151_936, "Qwen3-30B-A3B-Q4_K_M.gguf", [SMALL_QWEN3]),
    (
        "qwen2",
        7.62,
        152_064,
        "Qwen2.5-7B-Instruct-Q4_K_M.gguf",
        ["Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0"],
    ),
    (
        "qwen2",
        32.8,
        152_064,
        "Qwen2.5-Coder-32B-Instruct-Q4_K_M.gguf",
        [
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q8_0",
            "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0",
        ],
    ),
    (
        "llama",
        70.6,
        128_256,
        "Llama-3.3-70B-Instruct-Q4_K_M.gguf",
        ["bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"],
    ),
    (
        "gemma3",
        12.2,
        262_208,
        "gemma-3-12b-it-qat-Q4_0.gguf",
        ["ggml-org/gemma-3-270m-it-qat-GGUF:Q4_0"],
    ),
    (
        "gemma4",
        11.9,
        262_144,
        "gemma-4-12B-it-qat-UD-Q4_K_XL.gguf",
        ["Janvitos/gemma-4-12B-it-qat-assistant-MTP-Q8_0-GGUF:Q8_0"],
    ),
    (
        "llama",
        1.71,
        49_152,
        "SmolLM2-1.7B-Instruct-Q4_K_M.gguf",
        ["bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0"],
    ),
    ("lfm2", 1.17, 65_536, "LFM2.5-1.2B-Instruct-Q4_K_M.gguf", ["LiquidAI/LFM2.5-350M-GGUF:Q8_0"]),
    ("llama", 13.0, 32_000, "llama-2-13b.Q4_K_M.gguf", []),
    ("qwen3", 0.6, 151_936, "Qwen3-0.6B-Q8_0.gguf", []),
]


def header(architecture: str, billions: float, n_vocab: int, file: str) -> Header:
    tensor = Tensor("token_embd.weight", (int(billions * 1e6), 1000), "Q4_K")
    values = {"general.architecture": architecture, f"{architecture}.vocab_size": n_vocab}
    return Header((Path(file),), 0, values, (tensor,))


@pytest.mark.parametrize(("architecture", "billions", "n_vocab", "file", "drafts"), TARGETS)
def test_known_drafts(
    hub: Hub, architecture: str, billions: float, n_vocab: int, file: str, drafts: list[str]
) -> None:
    names = dict.fromkeys(draft for *_, each in TARGETS for draft in each)
    for i, name in enumerate(names):
        repo, _, quant = name.partition(":")
        hub.add(repo, {f"x-{quant}.gguf": b"GGUF" * (i + 1)})
    target = header(architecture, billions, n_vocab, file)
    found = list(known_drafts(target, NONE, asks=True))
    assert [each.name for each in found] == drafts
    assert [each.n_bytes for each in found] == [4 * ([*names].index(name) + 1) for name in drafts]
    assert list(known_drafts(target, NONE, asks=False)) == []


def test_a_repository_that_is_gone_is_left_out(hub: Hub) -> None:
    hub.add("Qwen/Qwen3-0.6B-GGUF", {"x-Q8_0.gguf": b"GGUF"})
    hub.add("AtomicChat/Qwen3-4B-DFlash-GGUF", {"x-Q2_K.gguf": b"GGUF"})
    target = header(*TARGETS[0][:4])
    assert [each.name for each in known_drafts(target, NONE, asks=True)] == [SMALL_QWEN3]
