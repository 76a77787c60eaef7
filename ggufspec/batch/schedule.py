"""Which prompt is next, and what becomes of one whose worker has died. Pure: no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Schedule:
    """The prompts that are left, by index; each is with nobody, with one worker, or done."""

    def __init__(self, left: Iterable[int], n_retries: int) -> None:
        self._left = deque(left)
        self._n_retries = n_retries
        self._attempts: dict[int, int] = {}  # of those that are out, or come back

    @property
    def is_over(self) -> bool:
        """Whether nothing is left, and nothing is out."""
        return not self._left and not self._attempts

    @property
    def has_next(self) -> bool:
        """Whether something waits for a worker."""
        return bool(self._left)

    def take(self) -> tuple[int, int]:
        """The next prompt, and which attempt at it this is, from 1."""
        index = self._left.popleft()
        attempt = self._attempts[index] = self._attempts.get(index, 0) + 1
        return index, attempt

    def finish(self, index: int) -> None:
        """It has its record."""
        del self._attempts[index]

    def give_back(self, index: int) -> bool:
        """Its worker died: it is the next again, or, where that was the last attempt, False."""
        if self._attempts[index] > self._n_retries:
            return False
        self._left.appendleft(index)
        return True
