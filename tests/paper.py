"""GGUF files of real shapes without their weights: a header, and as many zeros, which take no disk.

llama.cpp reads them with no_alloc, and so tells what a model of tens of gigabytes would take.
"""

from __future__ import annotations

import os
from pathlib import Path

from ggufspec.models.header import Header
from ggufspec.standin import plan, source_of

LLAMA_3_70B = source_of("meta-llama-3-70b-instruct:Q3_K_S")
LLAMA_3_8B = source_of("meta-llama-3-8b-instruct:Q3_K_L")
CODELLAMA_34B = source_of("codellama-34b:Q8_0")
CODELLAMA_7B = source_of("codellama-7b:Q4_K_M")
QWEN_3_30B = source_of("Qwen3-30B-A3B-Q4_K_M")


def write(path: Path, of: Header) -> Path:
    """The file of a model, sparse."""
    made = plan(of)
    path.write_bytes(made.header)
    os.truncate(path, made.n_bytes)
    return path
