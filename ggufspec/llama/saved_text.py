"""Copies what a sequence holds, and recurrent states, out of llama.cpp's memory and back."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.common.failures import log_failure
from ggufspec.common.files import fingerprint_of
from ggufspec.decoding.types import n_same, token_array
from ggufspec.errors import DecodeError, ModelError
from ggufspec.llama.context import Context
from ggufspec.llama.log import listening
from ggufspec.llama.state import State, set_state, state_of
from ggufspec.models.header import read_header

_N_BLOCKS = 1025  # of 64 KiB, that are hashed of a model's file

Saved = tuple[int, State]  # a recurrent state after so many tokens


class SavedText(NamedTuple):
    """tokens: of the cells. cells: in llama.cpp's form. checkpoints: see LlamaSession.

    n_least: a text that begins with fewer of the tokens cannot go on from the cells.
    state (1, width): of a head, the target's hidden state of the last token.
    """

    tokens: array[int]
    cells: State
    checkpoints: Sequence[Saved] = ()
    n_least: int = 0
    state: NDArray[np.float32] | None = None

    @property
    def n_bytes(self) -> int:
        n_saved = sum(saved.nbytes for _, saved in self.checkpoints)
        n_state = 0 if self.state is None else self.state.nbytes
        return int(self.cells.nbytes) + n_saved + n_state + len(self.tokens) * self.tokens.itemsize

    def n_usable(self, tokens: Sequence[int]) -> int:
        """Length of the prefix of a text that need not be decoded once this is restored."""
        n = n_same(self.tokens, token_array(tokens))
        if n >= self.n_least:
            return n
        return max((n_saved for n_saved, _ in self.checkpoints if n_saved <= n), default=0)


def save(context: Context, sequence: int) -> SavedText | None:
    """A copy of a sequence's state; None if it is empty, or lacks the state after its tokens.

    Raises DecodeError, ClosedError.
    """
    tokens = array("i", context.native.cells(sequence))
    if not tokens or not context.truncate(len(tokens), sequence):
        return None
    with listening():
        cells = state_of(context.pointer, sequence, 0, "a text")
    if not cells.size:
        raise DecodeError("llama.cpp saved nothing of a text")
    # A recurrent state covers all tokens. For layers with windows, llama.cpp saves only the cells
    # that the end of the text sees, so that one token can be dropped.
    is_recurrent = context.n_droppable is not None
    n_least = len(tokens) if is_recurrent else n_firm(context, len(tokens))
    return SavedText(tokens, cells, n_least=n_least)


def n_firm(context: Context, n_tokens: int) -> int:
    """How many of a restored text's tokens stay; a shorter common prefix needs a checkpoint."""
    return max(n_tokens - 1, 0) if context.model.has_windows else 0


def restore(context: Context, saved: SavedText, sequence: int) -> None:
    """Replace a sequence's state by a saved one. Raises DecodeError, ClosedError.

    `saved` is of a context of the same model, with caches of the same types. After an error, or a
    Ctrl-C, the sequence holds nothing.
    """
    context.truncate(0, sequence)
    context.native.begin_restore(context.n_cells(sequence), sequence)  # empty until all is copied
    with listening() as log:
        read = set_state(context.pointer, sequence, 0, saved.cells)
    if read != saved.cells.size:
        context.truncate(0, sequence)
        raise DecodeError(
            f"llama.cpp restored {read} of {saved.cells.size} bytes of a text. {log.complaints()}"
        )
    context.native.hold(saved.tokens, sequence)  # type: ignore[arg-type]  # int32


# Checkpoints are about 1, 2, 4 ... tokens from the end; nine of them reach back over a draft of
# defaults.N_DRAFT_LIMIT tokens.
_N_DISTANCES = 9


class Checkpoints:
    """The checkpoints of one sequence, in order of their numbers of tokens.

    A template may leave out parts of earlier answers, such as reasoning; the next turn then differs
    from the cached text right after the question. So checkpoints at the ends of the last messages
    are marked, and kept however far back they are.
    """

    def __init__(self, context: Context, sequence: int) -> None:
        self.saved: list[Saved] = []
        self._context = context
        self._sequence = sequence
        self._n_marked = context.options.n_checkpoints
        self._marked: list[int] = []  # their numbers of tokens

    @property
    def last(self) -> int:
        """Number of tokens of the last checkpoint; 0 without one."""
        return self.saved[-1][0] if self.saved else 0

    @property
    def n_bytes(self) -> int:
        return sum(state.nbytes for _, state in self.saved)

    def last_until(self, n_tokens: int) -> int:
        """Number of tokens of the last checkpoint with at most `n_tokens`; 0 without one."""
        return max((n for n, _ in self.saved if n <= n_tokens), default=0)

    def take(self, saved: Sequence[Saved]) -> None:
        """Replace all checkpoints by these, and mark them."""
        self.saved = list(saved)
        self._marked = [n for n, _ in saved][-self._n_marked :] if self._n_marked else []

    def save(self, *, is_marked: bool = False) -> None:
        """Copy the present state, if there is one.

        A failure is logged: without a checkpoint, going back decodes more tokens again.
        """
        n = self._context.n_cells(self._sequence)
        if is_marked and n not in self._marked:
            self._marked.append(n)
            del self._marked[: -self._n_marked]
        if n and self.last != n:
            try:
                state = self._context.checkpoint(self._sequence)
            except DecodeError as error:
                log_failure("a checkpoint was not saved, so a text may be read again", error)
                return
            self.saved.append((n, state))
            self.saved = thin(self.saved, n, self._marked)

    def drop_after(self, n_tokens: int) -> None:
        """Drop checkpoints of more than `n_tokens`, which belong to another text."""
        while self.last > n_tokens:
            self.saved.pop()
        self._marked = [n for n in self._marked if n <= n_tokens]

    def go_back(self) -> int:
        """Restore the last checkpoint, or empty the sequence; returns its number of tokens."""
        while self.saved:
            n_tokens, saved = self.saved[-1]
            self._context.restore(saved, n_tokens, self._sequence)
            if self._context.truncate(n_tokens, self._sequence):
                return n_tokens
            self.saved.pop()
        self._context.truncate(0, self._sequence)
        return 0

    def save_at_end(self, tokens: array[int]) -> int:
        """Save a marked checkpoint if a late message ends here.

        Returns the number of tokens to the next such end, or 0.
        """
        stops = list(self._context.model.vocab.stop_tokens)
        ends = np.flatnonzero(np.isin(tokens, stops)) + 1
        ends = ends[-self._n_marked :] if self._n_marked else ends[:0]
        n_held = self._context.n_cells(self._sequence)
        if n_held in ends:
            self.save(is_marked=True)
        behind = ends[ends > n_held]
        return int(behind[0]) - n_held if len(behind) else 0


def thin(checkpoints: list[Saved], n: int, marked: Collection[int] = ()) -> list[Saved]:
    """The marked checkpoints, and the oldest other one per doubling of the distance to n."""
    oldest: dict[int, int] = {}
    for n_tokens, _ in checkpoints:
        oldest.setdefault((n - n_tokens).bit_length(), n_tokens)
    kept = {n_tokens for distance, n_tokens in oldest.items() if distance < _N_DISTANCES}
    return [each for each in checkpoints if each[0] in kept or each[0] in marked]


def text_key(context: Context) -> dict[str, object]:
    """All facts that saved cells of a text depend on: cells with another key cannot be used."""
    model, options, link = context.model, context.options, context.link
    is_unified = context.can_share_passes or context.n_leaves > 1
    return {
        "model": model.description,
        "n_params": model.n_params,
        "fingerprint": _content(model.path),
        "LoRA": [[_content(each.path), each.scale] for each in model.adapters],
        "override_kv": [*map(str, model.key_overrides)],
        "is_head": link is not None,
        "n_vocab": context.n_vocab,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "flash_attention": options.flash_attention,
        # llama.cpp restores nothing into a cache that is divided otherwise.
        "n_slots of separate caches": 1 if is_unified else context.n_sequences,
        "llama_cpp_python": llama_cpp.__version__,
    }


def _content(path: Path) -> str | None:
    """A hash of a model file's content: all of it up to 64 MiB, else blocks spread over the file.

    Unlike a `fingerprint`, it differs between trainings of one model. None if it cannot be read.
    """
    try:
        stat = path.stat()
        return _hash_of(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ModelError):
        return None


@cache
def _hash_of(path: Path, n_bytes: int, changed_at: int) -> str:
    return fingerprint_of(read_header(path).paths, _N_BLOCKS)
