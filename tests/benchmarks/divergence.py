"""How far next-token distributions of a model are from 32-bit computation with the same weights.

Prints KL divergences (nats) at tokens after the depth of each text, of ggufspec's kernels and
attention, and of llama.cpp's with flash attention on and off. The reference is a copy of the model
whose weights llama-quantize turned into F32, with an F32 cache and without flash attention.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ggufspec.llama import kernels
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.quantize import requantize
from ggufspec.llama.session import LlamaSession

# Of kernels, and of flash attention.
_WAYS = {"own": ("on", "own"), "llama.cpp, on": ("off", "on"), "llama.cpp, off": ("off", "off")}


def save_distributions(path: str, way: str, cache: str, depth: int, n: int, *files: str) -> None:
    """Write log-probabilities (n texts * n, n_vocab) to "<way>.npy"; each pass has one token."""
    with closing(Model(Path(path))) as model:
        options = ContextOptions(
            n_ctx=depth + n, flash_attention=way, type_k=cache, type_v=cache, n_batch=512
        )
        with closing(Context(model, options)) as context:
            session, found = LlamaSession(context), []
            for file in files:
                text = Path(file).read_text(errors="replace")
                text = text[len(text) // 5 :]  # without what a file begins with
                tokens = model.vocab.tokenize(text, add_special=True, parse_special=False)
                tokens = tokens[: depth + n]
                assert len(tokens) == depth + n, f"{file} has {len(tokens)} tokens"
                for end in range(depth + 1, depth + n + 1):
                    row = session.score(tokens[:end])[0].astype(np.float64)
                    found.append(row - row.max() - np.log(np.exp(row - row.max()).sum()))
    np.save("distributions.npy", np.array(found))


def _child(folder: str, kernels_are: str, *given: object) -> np.ndarray:
    code = f"from {__spec__.name} import *; save_distributions(*{given!r})"
    environment = {**os.environ, kernels.VARIABLE: kernels_are, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    found: np.ndarray = np.load(Path(folder, "distributions.npy"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", help="long enough for the depth")
    parser.add_argument("--depth", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    given = parser.parse_args()
    rest = given.depth, given.tokens, *(str(text.resolve()) for text in given.texts)
    with TemporaryDirectory() as folder:
        copy = Path(folder, "f32.gguf")
        requantize(given.model, copy, "F32")
        exact = _child(folder, "off", str(copy), "off", "f32", *rest)
        for name, (which, way) in _WAYS.items():
            found = _child(folder, which, str(given.model.resolve()), way, "f16", *rest)
            each = (np.exp(exact) * (exact - found)).sum(axis=1)
            shown = f"99 % {np.quantile(each, 0.99):.2e}, largest {each.max():.2e}"
            sys.stdout.write(f"{name:15} mean {each.mean():.2e}, {shown}\n")


if __name__ == "__main__":
    main()
