"""Places for texts: sequences of the two contexts, and who writes into which.

A session is a memo, so no text depends on its slot; but one that finds its beginning there does
not read it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ggufspec.decoding.types import Logits
from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.session import LlamaSession

_NEARLY_ALL = 0.8  # of what a slot holds: a text that begins with that goes on with it
_HALF = 0.5  # of a text: who cannot borrow that goes where it is
_N_WORTH_BORROWING = 8  # tokens


class Slot:
    """A sequence of the target, and one of the draft where there is a draft."""

    def __init__(self, target: LlamaSession, draft: LlamaSession | None) -> None:
        self.target = target
        self.draft = draft
        self.n_users = 0
        self.used_at = 0  # the higher, the later


class Slots:
    """All slots of a pair. At least one."""

    def __init__(self, target: Context, draft: Context | None) -> None:
        self._all = [
            Slot(
                LlamaSession(target, i),
                LlamaSession(draft, i, n_vocab=target.n_vocab, drafts=True) if draft else None,
            )
            for i in range(target.n_sequences)
        ]
        self._can_borrow = target.can_share_passes
        self._clock = count(1)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def are_taken(self) -> bool:
        """Whether each has a text."""
        return all(slot.n_users for slot in self._all)

    def take(self, tokens: Sequence[int]) -> Slot:
        """A slot for a text: one that nobody uses, if there is one, with its beginning if possible.

        A text that goes on with what a slot holds gets that slot. Any other gets the one that was
        used longest ago, and what others hold of its beginning.
        """
        n_users = min(slot.n_users for slot in self._all)
        free = [slot for slot in self._all if slot.n_users == n_users]
        chosen = max(free, key=lambda slot: (slot.target.n_common(tokens), -slot.used_at))
        n_known = chosen.target.n_common(tokens)
        goes_on = n_known >= _NEARLY_ALL * chosen.target.n_held or (
            not self._can_borrow and n_known >= _HALF * len(tokens)
        )
        if not goes_on:
            chosen = min(free, key=lambda slot: slot.used_at)
            if self._can_borrow and not n_users:
                self._borrow(chosen, tokens)
        chosen.used_at = next(self._clock)
        chosen.n_users += 1
        return chosen

    def leave(self, slot: Slot) -> None:
        """A text has ended."""
        slot.n_users -= 1
        slot.used_at = next(self._clock)

    def nearest(self, tokens: Sequence[int]) -> Slot:
        """The slot that holds most of the beginning of a text."""
        return max(self._all, key=lambda slot: slot.target.n_common(tokens))

    def forget(self) -> None:
        """Hold nothing any more. Raises ClosedError."""
        for slot in self._all:
            for session in (slot.target, slot.draft):
                if session is not None:
                    session.forget()

    def _borrow(self, slot: Slot, tokens: Sequence[int]) -> None:
        for mine, theirs in (
            (slot.target, [other.target for other in self._all]),
            (slot.draft, [other.draft for other in self._all]),
        ):
            found = [(other.n_common(tokens), other) for other in theirs if other is not None]
            if mine is None or not found:
                continue
            n_known, other = max(found, key=lambda each: each[0])
            if n_known >= mine.n_common(tokens) + _N_WORTH_BORROWING:
                mine.borrow(other, n_known)


class SlotLease:
    """A text's slot, once it has one."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._slot: Slot | None = None

    @property
    def slot(self) -> Slot:
        """Valid between `take` and `leave`."""
        assert self._slot is not None
        return self._slot

    def take(self, tokens: Sequence[int]) -> None:
        """The text begins."""
        self._slot = self._slots.take(tokens)

    def leave(self) -> None:
        """The text has ended. Twice is fine."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._slots.leave(slot)


class LeasedSession:
    """The draft's session of a lease, as a core.Session."""

    def __init__(self, lease: SlotLease) -> None:
        self._lease = lease

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """See core.Session."""
        session = self._lease.slot.draft
        if session is None:
            raise OptionError("there is no draft to ask")
        return session.score(tokens, draft)
