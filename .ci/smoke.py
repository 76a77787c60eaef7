"""Tries an installed ggufspec with click and numpy alone, so without llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import numpy as np

import ggufspec
from ggufspec import _native
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.types import Draft

logits = np.array([[0, 9, 0, 0], [0, 0, 9, 0]], np.float32)
rows = to_probs(logits, Sampling(temperature=0.0), [0], [1])
verdict = verify.rule("traversal")(Draft([1]), rows, [0.5, 0.5])
assert (verdict.n_accepted, verdict.next_token) == (1, 2), verdict

names = {path.name for path in files("ggufspec").iterdir()}
assert {"_native.pyi", "py.typed", "models.toml"} <= names, names

command = [sys.executable, "-m", "ggufspec", "--version"]
told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
assert told.split()[-1] == ggufspec.__version__ == version("ggufspec"), told

print(f"ggufspec {ggufspec.__version__}, Python {sys.version.split()[0]}, {_native.__file__}")
