"""The loops over rows exist for several instruction sets, and compute the same with each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache

import pytest

LEVELS = ("baseline", "x86-64-v3", "x86-64-v4")
PROGRAM = """
import numpy as np
from ggufspec import _native
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.types import Draft
rng = np.random.default_rng(0)
sampling = Sampling(top_k=0, top_p=1.0, min_p=0.0, temperature=0.9)
found = []
for n_vocab in (3, 64, 1000, 70_001):
    logits = (4 * rng.standard_normal((4, n_vocab))).astype(np.float32)
    target = to_probs(logits, sampling, (), [0, 1, 2])
    draft = to_probs(logits[2::-1].copy(), sampling, (), [0, 1])
    for name in verify.names():
        verdict = verify.rule(name)(Draft([0, 1, 2], draft), target, rng.random(4))
        found += [verdict.n_accepted, verdict.next_token]
    found += [float(p) for p in np.asarray(target)[:, :: n_vocab // 3].ravel()]
    found.append(_native.gap_of(logits))
print(_native.instructions)
print(*found)
"""


@cache
def computed(level: str) -> tuple[str, tuple[float, ...]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "GGUFSPEC_INSTRUCTIONS": level},
        capture_output=True,
        text=True,
        check=True,
    )
    instructions, numbers = done.stdout.splitlines()
    return instructions, tuple(map(float, numbers.split()))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64 only")
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_computes_the_same(level: str) -> None:
    instructions, found = computed(level)
    if instructions != level:
        pytest.skip(f"this processor or compiler has no {level}")
    _, wanted = computed("baseline")
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-9)
    assert len(found) > 50
