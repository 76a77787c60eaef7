"""What a generation writes: its text, where that ends, and what it returns."""

from __future__ import annotations

import codecs
import re
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import AnyStr, Literal, NamedTuple

from ggufspec.decoding.stats import Stats
from ggufspec.engine.logprobs import TokenLogprobs
from ggufspec.engine.options import CheckedOptions

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not begin a character
_LAST_LINES = re.compile(r"\n[ \t\r\n]*\Z")  # which may be indented less than the text before
FinishReason = Literal["stop", "length"]


class Chunk(NamedTuple):
    """A piece of the text; `drafted[i]` is true if token i was proposed by the draft.

    `text` may lag behind `tokens`, by part of a character or of a stop string. `logprobs` has one
    entry per token if the generation was begun with `n_top`, else none. `ends[i]` is where token i
    ends, in characters of the whole text; a character of several tokens belongs to the last one.
    """

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The result of a generation.

    `tokens` are without the end-of-generation token, but with those of a stop string, which `text`
    leaves out; `finish_reason` is "stop" (the model ended, or a stop string came), "length"
    (max_tokens, or the context is full), None if cut short.
    `advice`: what to change, where drafting does not make this pair faster. `stop`: the stop string
    that ended the text.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    advice: str | None = None
    stop: str | None = None


class TextStream:
    """Turns the bytes of tokens into text as they come.

    Holds back what is not certain yet: the first bytes of a character, and text that may be the
    start of a stop string. `ended_by` is the first stop string that is complete; it and all text
    after it is never returned. `n_chars`: characters so far, also those held back. `before`: the
    last bytes of the prompt; if they end inside a character, the rest of its bytes is left out.
    `min_indent`: the text also ends before a line, but its first, with less white space before it.
    """

    def __init__(self, stop: Sequence[str] = (), before: bytes = b"", min_indent: int = 0) -> None:
        less = f"{{0,{min_indent - 1}}}"
        self._dedent = re.compile(rf"\n[ \t]{less}(?=[^ \t\r\n])") if min_indent else None
        self._stop = sorted(stop)
        self._n_longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._skips = bool(self._decoder.getstate()[0])
        self._decoder.reset()
        self._held = ""
        self.n_chars = 0
        self.has_ended = False
        self.ended_by: str | None = None

    def push(self, data: bytes) -> str:
        """The new text that is certain after these bytes."""
        if self._skips:
            data = data.lstrip(_CONTINUATION)
            self._skips = not data
        text = self._decoder.decode(data)
        self.n_chars += len(text)
        return self._release(text)

    def finish(self) -> str:
        """The text that was still held back, without the bytes of an incomplete character."""
        text, self._held = self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.has_ended:
            return ""
        if not self._stop and self._dedent is None:
            return text
        text = self._held + text
        found: list[tuple[int, str | None]] = [(text.find(stop), stop) for stop in self._stop]
        if self._dedent is not None and (dedent := self._dedent.search(text)):
            found.append((dedent.start(), None))
        ends = [each for each in found if each[0] >= 0]
        if ends:
            first, self.ended_by = min(ends, key=lambda each: each[0])
            self.has_ended, self._held = True, ""
            return text[:first]
        n_held = n_begun(text, self._stop, self._n_longest - 1)
        if self._dedent is not None and (line := _LAST_LINES.search(text)):
            n_held = max(n_held, len(text) - line.start())
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def n_begun(text: AnyStr, words: Sequence[AnyStr], n_most: int) -> int:
    """Length of the longest suffix of `text`, up to n_most, that begins one of sorted `words`."""
    for n in range(min(len(text), n_most), 0, -1):
        end = text[-n:]
        i = bisect_left(words, end)  # the first that starts with it, if one does
        if i < len(words) and words[i].startswith(end):
            return n
    return 0


class Room:
    """n_end: number of tokens, prompt included, at which the text ends or is shifted.

    n_dropped: tokens dropped so far.
    """

    def __init__(
        self, options: CheckedOptions, *, n_prompt: int, n_ctx: int, can_shift: bool
    ) -> None:
        """`can_shift`: it has no constraint, whose state counts from the prompt on."""
        n_most = n_ctx if options.max_tokens is None else options.max_tokens
        self.n_end = self._n_wanted = min(n_prompt + n_most, n_ctx)
        if can_shift and options.context_shift and not options.min_tokens:
            self._n_wanted = sys.maxsize if options.max_tokens is None else n_prompt + n_most
        self.n_dropped = 0
        self._n_ctx = n_ctx
        self._n_keep = min(n_prompt if options.n_keep < 0 else options.n_keep, n_ctx // 2)

    @property
    def can_shift(self) -> bool:
        """Whether the text may continue beyond the context, by dropping older tokens."""
        return self.n_end < self._n_wanted

    def shift(self, tokens: array[int]) -> None:
        """Drop the older half of a text, except the first tokens.

        The remaining tokens are processed again, so the next token has the model's distribution
        after them. (llama.cpp moves its cells instead, which depend on the dropped tokens.)
        """
        n = (len(tokens) - self._n_keep) // 2
        del tokens[self._n_keep : self._n_keep + n]
        self.n_dropped += n
        self._n_wanted -= n
        self.n_end = min(self._n_wanted, self._n_ctx)
