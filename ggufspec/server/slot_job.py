"""A job of the engine's worker that copies or drops the text of a slot."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ggufspec.engine.slots import Slot
from ggufspec.server.errors import ApiError


@dataclass(eq=False)
class SlotJob:
    """Work on a slot that no text uses."""

    slot: Slot
    work: Callable[[], Any]
    done: Future[Any]

    def run(self, lock: AbstractContextManager[object]) -> None:
        """Do the work, unless the job was cancelled."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            with lock:
                result = self.work()
        except BaseException as error:
            self.done.set_exception(error)
            if isinstance(error, (SystemExit, KeyboardInterrupt)):
                raise
        else:
            self.done.set_result(result)

    def fail(self, error: ApiError) -> None:
        """Report that the work will not be done."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)
