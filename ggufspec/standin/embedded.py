"""The embedded pair and its stand-ins: where the files lie, how to pad one. Loads no model."""

from ggufspec.common.files import default_cache_dir
from ggufspec.standin.padded import (
    PaddedShape,
    cached_target,
    embedded_draft,
    embedded_target,
    padded_size,
    padded_target,
    parse_size,
    plan_shape,
)

__all__ = [
    "PaddedShape",
    "cached_target",
    "default_cache_dir",
    "embedded_draft",
    "embedded_target",
    "padded_size",
    "padded_target",
    "parse_size",
    "plan_shape",
]
