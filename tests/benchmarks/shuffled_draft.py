"""Writes a useless draft: a model's own header and vocabulary, with shuffled weights.

python -m tests.benchmarks.shuffled_draft small.gguf FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np


def write_shuffled(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write a copy of a GGUF model with random matrices; returns its path.

    The blocks of each matrix are permuted, so type and scale stay the same in any quantization. The
    header (vocabulary, shapes) and vectors such as norms are unchanged.
    """
    import gguf

    path = folder / f"{source.stem}-shuffled.gguf"
    shutil.copyfile(source, path)
    random = np.random.default_rng(seed)
    with path.open("r+b") as file:
        for tensor in gguf.GGUFReader(source).tensors:
            if len(tensor.shape) < 2:
                continue
            _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            blocks = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, block_bytes)
            file.seek(int(tensor.data_offset))
            file.write(random.permutation(blocks).tobytes())
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write_shuffled(Path(sys.argv[1]), Path(sys.argv[2]))}\n")
