"""A draft that knows nothing: a model's own header and vocabulary, its weights dealt anew.

Knows GGUF tensors as blocks of bytes; refuses to know what they mean.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np


def write_scrambled(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write a copy of a GGUF model with random matrices; its path.

    The blocks of each matrix change places at random, so that it keeps type and scale in any
    quantization. The header (vocabulary, shapes) and vectors such as norms stay bit by bit.
    """
    import gguf

    path = folder / f"{source.stem}-scrambled.gguf"
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
