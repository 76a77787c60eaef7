"""Drafts only the text that a constraint forces; needs no draft model."""

from __future__ import annotations

from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.strategies.ngram import NgramDrafter


def make(materials: Materials) -> NgramDrafter:
    return NgramDrafter(materials)
