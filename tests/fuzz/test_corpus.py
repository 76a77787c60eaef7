"""Inputs that once failed, and random changes of them and of good ones, fail no more."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from fuzz.mutations import mutated
from fuzz.targets import TARGETS, try_input

CORPUS = Path(__file__).parent / "corpus"
N_MUTATIONS = {
    "constraints": 40,
    "template": 20,
    "schema": 100,
    "request": 40,
}  # the others are faster


def seeds_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


@pytest.mark.parametrize("name", TARGETS)
def test_only_the_documented_errors_and_soon(name: str) -> None:
    seeds, random = seeds_of(name), Random(0)
    inputs = [*seeds, *(mutated(seeds, random) for _ in range(N_MUTATIONS.get(name, 400)))]
    for data in inputs:
        try:
            try_input(TARGETS[name], data)
        except Exception as error:
            pytest.fail(f"{repr(error)[:300]} at {data[:500]!r} (of {len(data):,} bytes)")
