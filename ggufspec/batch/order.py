"""Records come as they finish and go out in the order of their prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class InOrder(Generic[Item]):
    """Holds back what is early."""

    def __init__(self, order: Iterable[int]) -> None:
        self._order = iter(order)
        self._due = next(self._order, None)
        self._early: dict[int, Item] = {}

    def push(self, index: int, item: Item) -> Iterator[Item]:
        """Take one; give all whose turn it is now."""
        self._early[index] = item
        while self._due is not None and self._due in self._early:
            yield self._early.pop(self._due)
            self._due = next(self._order, None)
