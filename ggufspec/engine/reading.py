"""Processes the prompt of a generation in pieces, on target and drafts, and scores its tokens."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress

from ggufspec.common.progress import NamedProgress
from ggufspec.decoding.types import Ask, Scored
from ggufspec.engine.logprobs import TokenLogprobs, logprobs_of
from ggufspec.engine.pair import Pair
from ggufspec.engine.slots import SlotSession
from ggufspec.errors import DecodeError
from ggufspec.llama.image_cells import images_in
from ggufspec.llama.session import LlamaSession, Piece

# Yields an Ask and, after its answer, None; also None for pieces that only a draft processes.
ReadingSteps = Generator[Ask | None, Scored | None, None]


class Reading:
    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        progress: NamedProgress | None,
        *,
        is_all: bool = False,
    ) -> None:
        """`is_all`: no round follows that could process the last tokens."""
        self.n_most = pair.target.n_batch  # tokens for the next pass
        self.n_sharers = 1  # texts in the pass
        self.n_reused = 0  # tokens whose cells the target already had
        self.n_left = 0  # last tokens, which the pass of the first round processes
        # Work for a draft on another device, which runs during the pass.
        self.beside: Piece | None = None
        self._pair = pair
        self._prompt = prompt
        self._progress = progress
        self._is_all = is_all
        self._sizes: dict[str, int] = {}  # of progress

    def steps(
        self,
        target: LlamaSession,
        drafts: Mapping[str, SlotSession],
        *,
        uses_head: bool,
        found: list[TokenLogprobs] | None,
        n_top: int | None,
    ) -> ReadingSteps:
        """Have the target, and `drafts` by name, process all but the last token of the prompt.

        Without drafts, the last `n_left` tokens are left to the pass of the first round.
        `found`: log-probabilities of the first tokens, to which the others are appended; None: none
        are computed.
        `uses_head`: a head drafts for the text.
        """
        head = self._pair.head
        if head is not None:
            head.use(target.sequence, is_used=uses_head and found is None)
        self.n_reused = len(self._prompt) - 1 - len(target.unread(self._prompt[:-1]))
        if found is not None and n_top is not None:
            yield from self._scores(found, n_top)
            if head is not None:
                head.use(target.sequence, is_used=uses_head)
        yield from self._pieces(target, drafts)

    def _scores(self, found: list[TokenLogprobs], n_top: int) -> ReadingSteps:
        target, prompt, vocab = self._pair.target, self._prompt, self._pair.vocab
        while (n := len(found)) < len(prompt):
            # The other texts of a pass have their rows in the same buffer.
            n_rows = target.n_outputs - target.n_rows * (self.n_sharers - 1)
            text = prompt[n : n + min(max(n_rows, target.n_rows), self.n_most)]
            scored = yield Ask(prompt[:n], text[:-1], n_read=len(text))
            assert scored is not None
            assert scored.logits is not None
            for row, token in zip(scored.logits, text, strict=True):
                found.append(logprobs_of(row, token, n_top, vocab))
            yield None

    def _pieces(self, target: LlamaSession, drafts: Mapping[str, SlotSession]) -> ReadingSteps:
        tokens = self._prompt[:-1]
        # A new text alone is read as llama.cpp reads it: batches of other sizes round differently.
        may_share = self._pair.target.can_share_passes or self.n_reused > 0
        is_shared = may_share and self._pair.target.reads_trees and not (drafts or self._is_all)
        beside = drafts.get("draft") if self._pair.are_apart else None
        while piece := target.piece(tokens, self.n_most):
            is_last = piece.n_unread < self.n_most and not images_in(tokens[-piece.n_unread :])
            if is_shared and is_last:
                self.n_left = piece.n_unread
                return
            if beside is not None:
                self.beside = beside.piece(tokens, self.n_most)
            n_known = len(tokens) - piece.n_unread + len(piece.tokens)
            yield Ask(tokens[:n_known], wants_rows=False, n_read=len(piece.tokens))
            self._report("target", piece)
            if self.beside is not None:
                self._report("draft", self.beside)
                self.beside = None
            yield None
        # A draft that fails here fails again in its first step: the drafter then goes on without.
        for name, draft in drafts.items():
            with suppress(DecodeError):
                while read := draft.piece(tokens, self.n_most):
                    read.context.decode(read.tokens, 0, read.sequence)
                    self._report(name, read)
                    yield None
                draft.feed(tokens)  # the rest of a head's, which has no pieces

    def end(self) -> None:
        """Report the last `n_left` tokens as processed."""
        if self._progress is not None and self.n_left:
            n = self._sizes.get("target", self.n_left)
            self._progress("target", n, n)
        self.n_left = 0

    def _report(self, name: str, piece: Piece) -> None:
        if self._progress is not None:
            n_all = self._sizes.setdefault(name, piece.n_unread)
            self._progress(name, max(n_all - piece.n_unread + len(piece.tokens), 0), n_all)
