"""Bytes of tokens to text, with stop strings."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from ggufspec.errors import OptionError

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character


class TextStream:
    """Turns the bytes of tokens into text as they come.

    Holds back what is not certain yet: the first bytes of a character, and text that may be the
    start of a stop string. `ended_by` is the first stop string that is complete; it and all text
    after it is never returned. `before`: the last bytes of the prompt; if they end inside a
    character, the rest of its bytes is left out.
    """

    def __init__(self, stop: Sequence[str] = (), before: bytes = b"") -> None:
        if "" in stop:
            raise OptionError("a stop string is empty; give at least one character")
        self._stop = sorted(stop)
        self._n_longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._skips = bool(self._decoder.getstate()[0])
        self._decoder.reset()
        self._held = ""
        self.ended_by: str | None = None

    def push(self, data: bytes) -> str:
        """The new text that is certain after these bytes."""
        if self._skips:
            data = data.lstrip(_CONTINUATION)
            self._skips = not data
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """The text that was still held back, without the bytes of an incomplete character."""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.ended_by is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        found = ((text.find(stop), stop) for stop in self._stop)
        first, stop = min((each for each in found if each[0] >= 0), default=(-1, None))
        if stop is not None:
            self.ended_by, self._held = stop, ""
            return text[:first]
        n_held = n_begun(text, self._stop, self._n_longest - 1)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def n_begun(text: str, words: Sequence[str], n_most: int) -> int:
    """Length of the longest suffix of `text`, up to n_most, that begins one of sorted `words`."""
    for n in range(min(len(text), n_most), 0, -1):
        end = text[-n:]
        i = bisect_left(words, end)  # the first that starts with it, if one does
        if i < len(words) and words[i].startswith(end):
            return n
    return 0
