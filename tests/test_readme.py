"""The examples of the README, and of the guide to drafting, work."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeSession, scripted_logits, speculated

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "ggufspec" / "drafting" / "README.md"


def python_blocks(path: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_strategy_of_the_guide_drafts() -> None:
    (block,) = [block for block in python_blocks(GUIDE) if "class Echo" in block]
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
    assert sum(round_.n_accepted for round_ in rounds) == 5
    assert tokens == [1, 2] * 6


@pytest.mark.parametrize("block", python_blocks())
def test_the_code_of_the_readme_is_python(block: str) -> None:
    compile(block, "README.md", "exec")
