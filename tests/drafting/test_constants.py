"""Every tuned number of drafting has a reason beside it; those of Python stand in one table."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from ggufspec.drafting import constants

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "ggufspec" / "drafting"
OTHERS = {"constants.py", "profile_store.py"}  # the latter's numbers are limits of a file format
MODULES = [path for path in sorted(ROOM.rglob("*.py")) if path.name not in OTHERS]
NOT_TUNED = {0, 1, 2, -1, 40}  # identities, indices, halves; 40 columns of a message
NATIVE = [
    ROOT / "native" / name for name in ("draft_length.cpp", "ngrams.cpp", "ngrams.h", "verify.cpp")
]
NOT_TUNED_NATIVE = {"kNever", "kBase", "kMix", "kSlotBitsFirst"}  # a sentinel; hashing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_other_module_has_tuned_numbers(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
        and node.value not in NOT_TUNED
    ]
    assert not found, f"move them to constants.py: {found}"


@pytest.mark.skipif(not NATIVE[0].exists(), reason="needs the sources of the extension")
def test_each_constant_of_the_extension_has_its_evidence() -> None:
    lines = "\n".join(path.read_text(encoding="utf-8") for path in NATIVE).splitlines()
    pattern = r" *(?:static )?constexpr (?:double|size_t|int|uint64_t) (k\w+) = [\w.-]+;(.*)"
    tuned = {}
    for above, line in pairwise(lines):
        if match := re.match(pattern, line):
            tuned[match[1]] = match[2] or above
    assert len(tuned) > len(NOT_TUNED_NATIVE)
    for name in tuned.keys() - NOT_TUNED_NATIVE:
        assert re.search(r"//.*\]", tuned[name]), f"{name} needs its evidence in brackets"


def test_each_constant_is_explained() -> None:
    source = Path(constants.__file__).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        if re.match(r"[A-Z_]+: Final", line):
            block = number
            while lines[block - 2].strip() and block not in commented:
                block -= 1  # a comment above explains a group
            assert block in commented or number in commented, line
