"""Paths of the embedded pair: two small models that are part of the package."""

from pathlib import Path


def embedded_target() -> Path:
    """The target: 7.2 M parameters, Q8_0."""
    return Path(__file__).with_name("classics-target.gguf")


def embedded_draft() -> Path:
    """The draft: 1.5 M parameters, Q8_0."""
    return Path(__file__).with_name("classics-draft.gguf")
