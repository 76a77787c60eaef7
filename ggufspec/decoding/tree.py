"""The shape of a draft that is a tree, given by the parent of each node: see types.Draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq


def depths(parents: Sequence[int]) -> list[int]:
    """For each node, how many tokens its path from the text on has, itself included."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def leaves(parents: Sequence[int]) -> list[int]:
    """The nodes that no other follows, in rising order."""
    inner = set(parents)
    return [node for node in range(len(parents)) if node not in inner]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the first after the text to `node`; none for -1."""
    found: list[int] = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def path_along(parents: Sequence[int], tokens: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes whose tokens `text` begins with, from the first on."""
    found: list[int] = []
    for node, parent in enumerate(parents):
        if len(found) == len(text):
            break
        if parent == (found[-1] if found else -1) and tokens[node] == text[len(found)]:
            found.append(node)
    return found


def n_equal(a: Iterable[object], b: Iterable[object]) -> int:
    """How many members at the start are equal; for arrays of tokens, types.n_same is faster."""
    return sum(takewhile(bool, map(eq, a, b)))
