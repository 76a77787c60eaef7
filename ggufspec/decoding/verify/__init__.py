"""The verification rules, found by file name: one file each, with a function `verify`."""

from __future__ import annotations

import importlib
import pkgutil

from ggufspec.decoding.types import Verify
from ggufspec.errors import OptionError


def names() -> list[str]:
    """The names of all rules. Those with an underscore, which tests add, are not listed."""
    return [name for name in _all_names() if not name.startswith("_")]


def rule(name: str) -> Verify:
    """The rule of that name. Raises OptionError if there is none."""
    if name not in _all_names():
        raise OptionError(
            f"there is no verification rule {name!r}; choose from {', '.join(names())}"
        )
    found: Verify = importlib.import_module(f"{__name__}.{name}").verify
    return found


def _all_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
