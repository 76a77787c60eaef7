"""Describes what `ggufspec trim` kept of a model, from the header of the trimmed file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggufspec.models.header import Header

_PREFIX = "ggufspec.trim."
_LIST = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


def trim_of(header: Header) -> dict[str, Any] | None:
    """The origin that a trimmed file records; None: it is not trimmed.

    source, source_hash; n_vocab: number of tokens of the source; tokens: number of kept tokens;
    layers: the kept layers. Without `tokens` or `layers`, all of them were kept.
    """
    found = {
        key.removeprefix(_PREFIX): value
        for key, value in header.values.items()
        if key.startswith(_PREFIX)
    }
    return found | ({"tokens": header.n_vocab} if "tokens" in found else {}) or None


def trim_text(trim: dict[str, Any]) -> str:
    kept = []
    if "tokens" in trim:
        kept.append(f"{trim['tokens']} of {trim.get('n_vocab', '?')} tokens")
    layers = trim.get("layers")
    if isinstance(layers, list) and all(isinstance(layer, int) for layer in layers):
        kept.append(f"layers {ranges(layers)}")
    return f"trimmed from {trim.get('source', 'an unknown model')} to {' and '.join(kept)}"


def numbers_of(text: str) -> tuple[int, ...] | None:
    """The ascending numbers of a list such as "0-9,14"; None if `text` is no such list."""
    if not _LIST.fullmatch(text):
        return None
    ends = (part.partition("-") for part in text.split(","))
    found = {i for low, _, high in ends for i in range(int(low), int(high or low) + 1)}
    return tuple(sorted(found)) or None


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: "0-9,14"."""
    runs = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)
