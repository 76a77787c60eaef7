"""The version is written once, in ggufspec/__init__.py."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import ggufspec

ROOT = Path(__file__).parents[1]


def test_metadata_has_the_version_of_the_package() -> None:
    assert version("ggufspec") == ggufspec.__version__


def test_the_newest_section_of_the_changelog_is_of_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert newest[1] == ggufspec.__version__
