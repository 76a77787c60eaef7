"""Logs failures that cost time, and no text: one line each."""

from __future__ import annotations

import logging

LOG = logging.getLogger("ggufspec.failures")
LOG.addHandler(logging.NullHandler())  # silent unless the application wants it


def log_failure(what: str, error: Exception) -> None:
    """Log what has failed, and what happens instead, with the reason."""
    LOG.warning("%s: %s", what, " ".join(str(error).split()))
