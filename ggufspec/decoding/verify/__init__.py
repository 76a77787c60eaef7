"""The verification rules, found by file name: one file each, with a function `verify`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

from ggufspec.decoding.types import Verify
from ggufspec.errors import OptionError

_OTHER_NAMES = {"block": "traversal"}  # the rule's name before it could judge trees


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def known(name: str) -> str:
    """The name of a rule; "traversal" for "block". Raises OptionError if there is no such rule."""
    found = _OTHER_NAMES.get(name, name)
    if f"{__name__}.{found}" not in sys.modules and found not in names():  # names() takes 0.1 ms
        raise OptionError(
            f"there is no verification rule {name!r}; choose from {', '.join(names())}"
        )
    return found


def rule(name: str) -> Verify:
    """The rule of that name. Raises OptionError if there is none."""
    found: Verify = _module(name).verify
    return found


def judges_trees(name: str) -> bool:
    """Whether that rule also judges trees: its file sets JUDGES_TREES."""
    return bool(getattr(_module(name), "JUDGES_TREES", False))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{known(name)}")
