"""A cache in memory for the texts that have left their slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggufspec.common import defaults
from ggufspec.decoding.types import Logits, token_array
from ggufspec.llama.devices import free_memory
from ggufspec.llama.saved_text import SavedText

_MIB = 2**20
_RATE = 0.3  # weight of a new measurement of copying or reading
_N_TIMED = 32  # minimum prompt tokens for a measurement of reading


class PromptRow(NamedTuple):
    """A prompt, and the target's logits (1, n_vocab) after it."""

    prompt: array[int]
    logits: Logits


@dataclass(frozen=True, eq=False)
class CachedText:
    """Copies of a text's state in the sessions of a slot: target and draft."""

    tokens: array[int]  # of the target
    saved: Sequence[SavedText | None]
    row: PromptRow | None = None

    @property
    def n_bytes(self) -> int:
        n_row = self.row.logits.nbytes if self.row is not None else 0
        return n_row + sum(each.n_bytes for each in self.saved if each is not None)

    def n_usable(self, tokens: Sequence[int]) -> int:
        """Length of the prefix of `tokens` that the target need not decode with this copy."""
        target = self.saved[0]
        return target.n_usable(tokens) if target is not None else 0

    def replaces(self, other: CachedText) -> bool:
        """Whether it can serve every text that `other` can serve, as well as that."""
        return self.n_usable(other.tokens) == len(other.tokens)

    def begins(self, tokens: array[int]) -> bool:
        return self.tokens == tokens[: len(self.tokens)]


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
        return sum(text.n_bytes for text in self._texts)

    def make_room(self, tokens: array[int], n_bytes: int) -> bool:
        """Drop texts until a copy of `tokens` has room; returns whether to make and `add` it.

        Not if it is larger than the cache, or if a text that can replace it is kept, which then
        counts as used. Texts that begin `tokens` are dropped first.
        """
        for known in self._texts:
            if known.n_usable(tokens) == len(tokens):
                self._texts.remove(known)
                self._texts.append(known)
                return False
        if n_bytes > self.n_bytes:
            return False
        while self.n_held + n_bytes > self.n_bytes:
            self._texts.remove(min(self._texts, key=lambda text: not text.begins(tokens)))
        return True

    def add(self, text: CachedText) -> None:
        """Keep a text, unless a longer one that can replace it is kept; drop those it replaces."""
        if not self.make_room(text.tokens, text.n_bytes):
            return
        self._texts = [known for known in self._texts if not text.replaces(known)]
        self._texts.append(text)

    def take(self, tokens: Sequence[int], n_known: int) -> CachedText | None:
        """Remove and return the text with the longest usable prefix of `tokens`.

        None if copying it would be slower than reading. `n_known`: length of the prefix that need
        not be read without it.
        """
        tokens = token_array(tokens)
        best = max(self._texts, key=lambda text: text.n_usable(tokens), default=None)
        if best is None:
            return None
        n_saved = best.n_usable(tokens) - n_known
        costs = best.n_bytes * self._copy_seconds
        if n_saved <= 0 or costs > n_saved * (self._read_seconds or costs):
            return None
        self._texts.remove(best)
        return best

    def observe_copy(self, n_bytes: int, seconds: float) -> None:
        self._copy_seconds = _learned(self._copy_seconds, seconds / max(n_bytes, 1))

    def observe_reading(self, n_tokens: int, seconds: float) -> None:
        """Learn that target and drafts read `n_tokens` of a prompt in `seconds`."""
        if n_tokens >= _N_TIMED:
            self._read_seconds = _learned(self._read_seconds, seconds / n_tokens)

    def forget(self) -> None:
        self._texts.clear()


def n_cache_bytes(cache_ram: int | None) -> int:
    """Bytes of a cache of `cache_ram` MiB; None: a share of the memory that is free now."""
    if cache_ram is not None:
        return cache_ram * _MIB
    return min(defaults.CACHE_RAM * _MIB, (free_memory() or 0) // 4)


def _learned(known: float, new: float) -> float:
    return known + _RATE * (new - known) if known else new
