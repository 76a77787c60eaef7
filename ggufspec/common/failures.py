"""Handles failures: logs those that cost time, and no text; closes what was half made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG = logging.getLogger("ggufspec.failures")
LOG.addHandler(logging.NullHandler())  # silent unless the application wants it


def log_failure(what: str, error: Exception) -> None:
    """Log what has failed, and what happens instead, with the reason."""
    LOG.warning("%s: %s", what, " ".join(str(error).split()))


@contextmanager
def closed_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Call `close` if the block fails, also by Ctrl-C."""
    try:
        yield
    except BaseException:
        close()
        raise
