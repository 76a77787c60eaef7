"""The verification rules, found by file name: one file each, with a function `verify`."""

from __future__ import annotations

import importlib
import pkgutil

from ggufspec.decoding.types import Verify
from ggufspec.errors import OptionError


def names() -> list[str]:
    """The names of all rules."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def rule(name: str) -> Verify:
    """The rule of that name. Raises OptionError if there is none."""
    known = names()
    if name not in known:
        raise OptionError(f"there is no verification rule {name!r}; choose from {', '.join(known)}")
    found: Verify = importlib.import_module(f"{__name__}.{name}").verify
    return found
