"""The cells of images in a text of token ids: see native/images.h."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import token_array

CellsFor = Callable[["array[int]"], Sequence[int]]  # other cells for those of an image; or none

_ENDS, _N_MOST_POSITIONS, _BITS = 1 << 30, (1 << 12) - 1, (1 << 30) - 1


def cells_of(name: bytes, n_cells: int, n_positions: int) -> array[int]:
    """The ids of the cells of an image; `name` tells images apart. Raises ValueError."""
    n_positions = 0 if n_positions == n_cells else n_positions
    if not 0 <= n_positions <= _N_MOST_POSITIONS:
        raise ValueError(f"an image takes {n_positions:,} positions")
    drawn = np.frombuffer(shake_256(name).digest(4 * n_cells), "<u4") & _BITS
    ids = drawn.astype(np.int64) - 2**31
    last = (int(drawn[-1]) & ~_N_MOST_POSITIONS) | _ENDS | n_positions
    ids[-1] = last - 2**31
    return array("i", ids.tolist())


def has_images(tokens: array[int]) -> bool:
    return len(tokens) > 0 and bool(_values(tokens).min() < 0)


def n_apart(tokens: array[int], n_most: int) -> int:
    """How many of the first `n_most` tokens one pass takes: an image has passes of its own."""
    cells = np.flatnonzero(_values(tokens[:n_most]) < 0)
    if not len(cells):
        return n_most
    return int(cells[0]) or len(images_in(tokens)[0])


def without_images(tokens: Sequence[int]) -> array[int]:
    """The tokens of a text, as a model reads it that has no projector."""
    return replaced(token_array(tokens), lambda cells: ())


def replaced(tokens: array[int], cells_for: CellsFor) -> array[int]:
    """A text with other cells for its images, such as those of another projector."""
    if not has_images(tokens):
        return tokens
    found, done = array("i"), 0
    for start, stop in _places(tokens):
        found += tokens[done:start]
        found.extend(cells_for(tokens[start:stop]))
        done = stop
    return found + tokens[done:]


def n_replaced(tokens: array[int], n: int, cells_for: CellsFor) -> int:
    """Length of the longest prefix of a text of which `replaced` makes at most `n` tokens."""
    if not has_images(tokens):
        return n
    done = 0
    for start, stop in _places(tokens):
        n_cells = len(cells_for(tokens[start:stop]))
        if n < start - done + n_cells:
            return min(done + n, start)
        n -= start - done + n_cells
        done = stop
    return done + n


def n_to_last_image(tokens: array[int]) -> int:
    """Length of the prefix that ends with the last image; 0 without one."""
    cells = np.flatnonzero(_values(tokens) < 0)
    return int(cells[-1]) + 1 if len(cells) else 0


def images_in(tokens: Sequence[int]) -> list[array[int]]:
    """The cells of each image of a text; the last image may be incomplete."""
    tokens = token_array(tokens)
    return [tokens[start:stop] for start, stop in _places(tokens)]


def _places(tokens: array[int]) -> list[tuple[int, int]]:
    """Where each image begins and ends."""
    values = _values(tokens)
    (cells,) = np.nonzero(values < 0)
    ends = np.flatnonzero((values[cells] & _ENDS) != 0) + 1
    parts = np.split(cells, ends)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


def _values(tokens: array[int]) -> NDArray[np.int32]:
    return np.frombuffer(tokens, np.int32)
