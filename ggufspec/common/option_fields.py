"""Options that are fields of a dataclass: each has its default and its check there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, NamedTuple


class Option(NamedTuple):
    default: Any
    check: Callable[[str, Any], Any]  # returns the value of the field, or raises OptionError
    value: Any  # of the field, for the default

    def checked(self, name: str, value: object) -> Any:
        """The value of the field; None stands for a default to be chosen. Raises OptionError."""
        is_default = value is None and self.value is None
        return None if is_default else self.check(name, value)


def option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """A field of a dataclass."""
    value = None if default is None else check("", default)
    return field(default=value, metadata={"option": Option(default, check, value)})


def options_of(made: type[Any]) -> dict[str, Option]:
    """The options of a dataclass, by name."""
    return {each.name: each.metadata["option"] for each in fields(made) if each.metadata}
