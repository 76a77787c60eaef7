"""Texts that have left their slots, kept in memory so that later turns need not read them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.common import defaults
from ggufspec.decoding.types import n_same, token_array
from ggufspec.llama.devices import free_memory
from ggufspec.llama.saved_text import SavedText

_MIB = 2**20
_RATE = 0.3  # of learning what copies and reading cost
_N_TIMED = 32  # tokens of a prompt that says what reading costs


@dataclass(frozen=True, eq=False)
class CachedText:
    """What the sessions of a slot held of a text: target, draft, draft of the draft."""

    tokens: array[int]  # of the target
    saved: Sequence[SavedText | None]

    @property
    def n_bytes(self) -> int:
        return sum(each.n_bytes for each in self.saved if each is not None)


class PromptCache:
    """Cached texts of at most `n_bytes`; those that were used longest ago go first."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._texts: list[CachedText] = []  # by use, the latest last
        self._copy_seconds = 0.0  # for each byte
        self._read_seconds = 0.0  # for each token

    @property
    def n_texts(self) -> int:
        return len(self._texts)

    @property
    def n_held(self) -> int:
        """Bytes of all texts."""
        return sum(text.n_bytes for text in self._texts)

    def add(self, text: CachedText) -> None:
        """Keep a text, unless a longer one that begins with it is kept; drop what has no room."""
        for known in self._texts:
            if n_same(known.tokens, text.tokens) == len(text.tokens):
                return
        self._texts = [
            known for known in self._texts if n_same(known.tokens, text.tokens) < len(known.tokens)
        ]
        self._texts.append(text)
        while self._texts and self.n_held > self.n_bytes:
            del self._texts[0]

    def take(self, tokens: Sequence[int], n_known: int) -> CachedText | None:
        """The text with the longest common beginning, if copying it is faster than reading.

        `n_known`: tokens at the start of `tokens` that need not be read without it. It is no longer
        in the cache.
        """
        tokens = token_array(tokens)
        best = max(self._texts, key=lambda text: n_same(text.tokens, tokens), default=None)
        if best is None:
            return None
        n_saved = n_same(best.tokens, tokens) - n_known
        costs = best.n_bytes * self._copy_seconds
        if n_saved <= 0 or costs > n_saved * (self._read_seconds or costs):
            return None
        self._texts.remove(best)
        return best

    def observe_copy(self, n_bytes: int, seconds: float) -> None:
        """Copying so many bytes took that long."""
        self._copy_seconds = _learned(self._copy_seconds, seconds / max(n_bytes, 1))

    def observe_reading(self, n_tokens: int, seconds: float) -> None:
        """Target and drafts have read so many tokens of a prompt in that time."""
        if n_tokens >= _N_TIMED:
            self._read_seconds = _learned(self._read_seconds, seconds / n_tokens)

    def forget(self) -> None:
        """Drop all texts."""
        self._texts.clear()


def n_cache_bytes(cache_ram: int | None) -> int:
    """Bytes for a cache of so many MiB; None: a share of the memory that is free now."""
    if cache_ram is not None:
        return cache_ram * _MIB
    return min(defaults.CACHE_RAM * _MIB, (free_memory() or 0) // 4)


def _learned(known: float, new: float) -> float:
    return known + _RATE * (new - known) if known else new
