"""Slots: sequences of target and drafts, which texts lease."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from ggufspec.common.failures import log_failure
from ggufspec.decoding.types import Ask, Logits, token_array
from ggufspec.engine.prompt_cache import CachedText, PromptCache, PromptRow
from ggufspec.errors import DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.head import Head, HeadSession
from ggufspec.llama.head_sessions import BlockHeadSession, SharedCacheSession
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab_map import VocabMap

# A prompt continues a slot if it begins with nearly all of its last prompt. Chat templates of
# reasoning models drop the last tokens of an earlier prompt ("<think>", 4 tokens at most).
_N_DROPPED = 4
_NEARLY_ALL = 0.8  # share of a short prompt
_HALF = 0.5  # share of a prompt, for models whose cells cannot be copied between slots
_N_WORTH_BORROWING = 8  # tokens
# A slot's text is cached if it would lose at least this many tokens, and this share of them.
_N_WORTH_KEEPING = 64
_SHARE_WORTH_KEEPING = 0.25

# Of a target, or any kind of draft; LlamaSession tells what their methods do.
SlotSession = LlamaSession | MappedSession | HeadSession | BlockHeadSession | SharedCacheSession


@dataclass(eq=False)
class Slot:
    """A sequence of the target, and one of the draft if there is one."""

    target: LlamaSession
    draft: SlotSession | None
    is_used: bool = False  # by a text, or by work that copies one
    used_at: int = 0  # the clock at its last use
    n_prompt: int = 0  # tokens of its last prompt
    text: array[int] | None = None  # its last text with the prompt; None: not finished
    row: PromptRow | None = None  # of its last prompt

    @property
    def sessions(self) -> Sequence[SlotSession]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def is_continued_by(self, n_common: int) -> bool:
        """Whether a prompt that shares its first `n_common` tokens repeats or continues it."""
        return n_common >= max(self.n_prompt - _N_DROPPED, _NEARLY_ALL * self.n_prompt, 1)

    @property
    def n_bytes(self) -> int:
        """Bytes of a copy of its cells and checkpoints, about. Raises ClosedError."""
        n_row = self.row.logits.nbytes if self.row is not None else 0
        return n_row + sum(each.n_bytes for each in self.sessions)

    @property
    def last_text(self) -> array[int]:
        """Its last text with the prompt; of an unfinished one, what the target holds."""
        return self.target.held if self.text is None else self.text

    def saved(self, text: Sequence[int] | None = None) -> CachedText | None:
        """A copy of the cells of `text`, by default its last text; None if it has none.

        Drops other cells, such as those of rejected drafts. Raises DecodeError, ClosedError.
        """
        text = self.last_text if text is None else text
        target, draft = self.target.save(text), self.draft.save(text) if self.draft else None
        return CachedText(target.tokens, (target, draft), self.row) if target is not None else None

    def read(self, tokens: Sequence[int]) -> None:
        """Have target and drafts process a text. Raises DecodeError, ClosedError."""
        for session in self.sessions:
            session.feed(tokens)

    def restore(self, text: CachedText) -> None:
        """Replace the slot's state by a saved text. Raises DecodeError, ClosedError."""
        self.text, self.row = None, text.row
        for session, saved in zip(self.sessions, text.saved, strict=False):
            session.restore(saved)

    def row_for(self, first: Ask) -> Logits | None:
        """The logits (1, n_vocab) for a text's first Ask, if it repeats a prompt without a draft.

        A pass over the prompt's last token alone rounds differently, and can change greedy texts.
        """
        row = self.row
        if row is None or first.draft or row.prompt != first.tokens:
            return None
        return row.logits if self.target.n_common(row.prompt) == len(row.prompt) else None

    def forget(self) -> None:
        """Empty the slot. Raises ClosedError."""
        self.text = self.row = None
        for session in self.sessions:
            session.forget()


class Slots:
    """All slots of a pair. At least one. For the engine's thread only."""

    def __init__(
        self,
        target: Context,
        draft: Context | None,
        head: Head | None = None,
        vocab_map: VocabMap | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        """`head`: whose context `draft` is, if it is one. `vocab_map`: for a draft with another
        vocabulary than the target's. `cache` keeps texts that have left their slots.
        """
        self._all = [
            Slot(
                LlamaSession(target, i),
                head.sessions[i] if head else _draft_session(draft, i, target, vocab_map),
            )
            for i in range(target.n_sequences)
        ]
        self._can_borrow = target.can_share_passes
        self._keeps_rows = head is None  # which needs the hidden state of a prompt's last token
        self._clock = count(1)  # gives values of used_at
        self.cache = cache or PromptCache(0)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Slot:
        return self._all[index]

    @property
    def free(self) -> Sequence[Slot]:
        return [slot for slot in self._all if not slot.is_used]

    def take(self, tokens: Sequence[int]) -> Slot:
        """Choose one of the free slots, at least one, for a prompt. Give it back with `leave`.

        A prompt that repeats or continues the last prompt of a slot gets that slot: the same cells
        give a repeated prompt the same answer. Any other prompt gets the slot that was used longest
        ago, and a copy of the cells that other slots hold of its beginning.
        """
        free = self.free
        known = {slot: slot.target.n_common(tokens) for slot in free}
        continued = [slot for slot in free if slot.is_continued_by(known[slot])]
        chosen = max(continued or free, key=lambda slot: (known[slot], -slot.used_at))
        if not (continued or (known[chosen] >= _HALF * len(tokens) and not self._can_borrow)):
            chosen = min(free, key=lambda slot: slot.used_at)
            self.keep(chosen, tokens)
            if self._can_borrow:
                self._borrow(chosen, tokens)
        else:
            self.keep(chosen, tokens)
        self._restore(chosen, tokens)
        chosen.used_at, chosen.n_prompt, chosen.text = next(self._clock), len(tokens), None
        chosen.is_used = True
        return chosen

    def leave(self, slot: Slot, text: array[int] | None) -> None:
        """The work on a slot has ended with `text`, prompt included. Twice is fine."""
        if slot.is_used:
            slot.is_used, slot.text, slot.used_at = False, text, next(self._clock)

    def keep_row(self, slot: Slot, prompt: array[int], logits: Logits) -> None:
        """Keep a copy of the logits after a slot's prompt: the first of `logits`."""
        if self._keeps_rows:
            slot.row = PromptRow(prompt[:], logits[:1].copy())

    def keep(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Copy a slot's text into the cache, if much of it differs from `tokens`.

        A failure is logged: it costs later texts time, and nothing else. Raises ClosedError.
        """
        n_held, n_known = slot.target.n_held, slot.target.n_common(tokens)
        least = max(_N_WORTH_KEEPING, _SHARE_WORTH_KEEPING * n_held)
        if not self.cache.n_bytes or n_held - n_known < least:
            return
        if n_known >= _N_WORTH_KEEPING and slot.target.is_cut_by_saving:
            return  # copying is skipped: reuse now is worth more than later
        held = slot.last_text[: slot.target.n_common(slot.last_text)]
        if not self.cache.make_room(held, slot.n_bytes):
            return
        started = perf_counter()
        try:
            text = slot.saved()
        except DecodeError as error:
            log_failure("a text was not kept for later prompts", error)
            return
        if text is not None:
            self.cache.observe_copy(text.n_bytes, perf_counter() - started)
            self.cache.add(text)

    def spare(self) -> Slot:
        """The free slot that is needed least, for measurements; its text is cached."""
        slot = min(self.free, key=lambda slot: slot.used_at)
        self.keep(slot, ())
        return slot

    def _restore(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Copy a cached text into a slot, if that is faster than reading the rest of `tokens`."""
        text = self.cache.take(tokens, slot.target.n_common(tokens) + _N_WORTH_BORROWING)
        if text is None:
            return
        started = perf_counter()
        try:
            slot.restore(text)
        except DecodeError:  # such as no room in the caches: the prompt is processed instead
            slot.forget()
            return
        self.cache.observe_copy(text.n_bytes, perf_counter() - started)

    @contextmanager
    def lent(self, tokens: Sequence[int]) -> Iterator[Slot]:
        """A slot for a block that reads a text or copies one into it, without a generation."""
        slot = self.take(tokens)
        try:
            yield slot
        finally:
            self.leave(slot, token_array(tokens))

    def nearest(self, tokens: Sequence[int]) -> Slot:
        return max(self._all, key=lambda slot: slot.target.n_common(tokens))

    def forget(self) -> None:
        """Empty all slots. Raises ClosedError."""
        self.cache.forget()
        for slot in self._all:
            slot.forget()

    def _borrow(self, slot: Slot, tokens: Sequence[int]) -> None:
        of_all = zip(*(each.sessions for each in self._all), strict=True)
        for mine, theirs in zip(slot.sessions, of_all, strict=True):
            found = [(other.n_common(tokens), other) for other in theirs]
            n_known, other = max(found, key=lambda each: each[0])
            if n_known >= mine.n_common(tokens) + _N_WORTH_BORROWING:
                mine.borrow(other.sequence, tokens[:n_known])


def _draft_session(
    draft: Context | None, sequence: int, target: Context, vocab_map: VocabMap | None
) -> SlotSession | None:
    if draft is None:
        return None
    if vocab_map is None:
        how: dict[str, Any] = {"n_vocab": target.n_vocab, "drafts": True}
        if target.projector is not None and draft.projector is not target.projector:
            how["cells_for"] = target.projector.in_draft
        return LlamaSession(draft, sequence, **how)
    return MappedSession(LlamaSession(draft, sequence, drafts=True), vocab_map)
