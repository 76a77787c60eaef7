"""Paths in a draft that is a tree; `parents[i]` is the parent of node i, -1 for the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node: 1 for a node that follows the text."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def leaves(parents: Sequence[int]) -> list[int]:
    """The nodes without children, in rising order."""
    inner = set(parents)
    return [node for node in range(len(parents)) if node not in inner]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the text to `node`, both ends of the path included; empty for -1."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def path_along(parents: Sequence[int], tokens: Sequence[int], text: Sequence[int]) -> list[int]:
    """The longest path whose tokens are a prefix of `text`, as nodes."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        if len(found) == len(text):
            break
        if parent == (found[-1] if found else -1) and tokens[node] == text[len(found)]:
            found.append(node)
    return found


def n_equal(a: Iterable[object], b: Iterable[object]) -> int:
    """Length of the common prefix; for arrays of tokens, types.n_same is faster."""
    return sum(takewhile(bool, map(eq, a, b)))
