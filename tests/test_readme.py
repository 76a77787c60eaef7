"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeSession, scripted_logits, speculated

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling

README = Path(__file__).parents[1] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_drafter_of_the_readme_drafts() -> None:
    (block,) = [block for block in python_blocks() if "class Echo" in block]
    room: dict[str, object] = {}
    exec(block, room)
    tokens = [1, 2]
    rounds = speculated(
        tokens,
        target=FakeSession(scripted_logits([1, 2], 5)),
        drafter=room["make"](None),  # type: ignore[operator]
        verify=verify.rule("rejection"),
        sampling=Sampling(temperature=0),
        uniforms=np.zeros,
        n_draft=3,
        n_end=12,
    )
    assert sum(turn.n_accepted for turn in rounds) == 5
    assert tokens == [1, 2] * 6


@pytest.mark.parametrize("block", python_blocks())
def test_the_code_of_the_readme_is_python(block: str) -> None:
    compile(block, "README.md", "exec")
