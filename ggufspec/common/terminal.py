"""Escapes control characters, so that text of a model or a file cannot control the terminal."""

from __future__ import annotations

import logging
import re

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    """The text with control characters, except newline and tab, as escapes such as \\x1b."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class LogFormatter(logging.Formatter):
    """Formats records with `visible`."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
