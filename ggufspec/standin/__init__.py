"""Files of the shape of any model, whose text is a planted map: its speed before its download."""

from ggufspec.standin.blueprint import Blueprint, blueprint_of, of_header, of_shape
from ggufspec.standin.file import StandIn, check_path, plan, write

__all__ = [
    "Blueprint",
    "StandIn",
    "blueprint_of",
    "check_path",
    "of_header",
    "of_shape",
    "plan",
    "write",
]
