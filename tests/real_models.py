"""Real models: the names of their files, what the fixtures return, and llama.cpp's own text."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ggufspec.engine.engine import Engine

VARIABLE = "GGUFSPEC_REAL_MODELS"
FILES = {
    "qwen": "qwen-1.5b.gguf",  # Qwen2.5-Coder 1.5B Instruct, Q4_K_M
    "qwen-draft": "qwen-0.5b.gguf",  # Qwen2.5-Coder 0.5B Instruct, Q4_K_M
    "smollm": "smollm2-135m.gguf",  # SmolLM2 135M Instruct, Q4_1
    "gemma": "gemma-3-270m.gguf",  # Gemma 3 270M, not tuned for chat, Q4_K_M
}

PathOf = Callable[[str], Path]
Load = Callable[..., Engine]
MakeLlama = Callable[..., Any]
Program = Callable[..., str]


def greedy(llama: Any, prompt: list[int], n_tokens: int) -> list[int]:
    """Llama's greedy continuation, in the batches of ggufspec: the last token comes alone."""
    llama.reset()
    llama.eval(prompt[:-1])
    return list(itertools.islice(llama.generate(prompt, temp=0.0), n_tokens))
