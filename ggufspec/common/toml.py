"""Parses TOML on all supported versions of Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOMLDecodeError = tomllib.TOMLDecodeError
parse_toml: Callable[[str], dict[str, Any]] = tomllib.loads


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed content of a TOML file of this package."""
    return parse_toml(path.read_text(encoding="utf-8"))
