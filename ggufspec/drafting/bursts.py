"""Generates a draft model's tokens by speculative decoding, with drafts from n-grams.

Chen et al., https://arxiv.org/abs/2312.11462; Spector and Re, https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from ggufspec.decoding.loop import Loop, speculate
from ggufspec.decoding.sampling import Rows, Sampling, as_rows
from ggufspec.decoding.types import Ask, Draft, Probs, Round, Scored, Session, Uniforms, Verdict
from ggufspec.drafting.strategies import Stage, ngram
from ggufspec.errors import DecodeError


class Burst(NamedTuple):
    """The distributions of a burst's tokens: `rows` of `probs`, valid until the next burst.

    `n_read`: number of tokens of the text that the draft model has read. `is_last`: no token of the
    draft's vocabulary may follow.
    """

    probs: Rows
    rows: Sequence[int]
    n_vocab: int
    n_read: int
    is_last: bool


class Bursts:
    """Generates several tokens per pass of the draft model.

    The draft model is the target of the decoding loop here. Each token is a draw from the draft
    model's distribution, whatever the size of the burst. So a draft may end after any token, for
    reasons that do not depend on the next token.
    """

    def __init__(self, session: Session, stage: Stage) -> None:
        self._session = session
        self._stage = stage
        self._drafter = ngram.make(stage.materials)
        self._loop: Loop | None = None
        self._judged: list[tuple[Draft, Rows, Verdict]] = []  # by the last round
        self._n_drafted = self._n_accepted = 0

    def start(self, context: array[int], sampling: Sampling, n_end: int, n_draft: int) -> None:
        """Begin a draft: bursts will append to `context`, up to `n_end` tokens in total.

        `n_draft`: expected maximum length of the draft.
        """
        stage = self._stage
        sampling = replace(sampling, state=copy(sampling.state))  # the target's goes on from itself
        self._loop = speculate(
            context,
            drafter=self._drafter,
            verify=self._verify,
            sampling=sampling,
            uniforms=stage.uniforms,
            n_draft=min(stage.materials.n_draft_max, max(n_draft - 1, 0)),
            n_end=n_end,
            stop_tokens=stage.materials.stop_tokens,
        )

    def write(self, context: array[int]) -> Burst:
        """Append at least one token to `context`. Raises as `score` and `draw` do."""
        assert self._loop is not None
        self._judged.clear()
        n_before, is_last = len(context), False
        ask = next(self._loop)
        assert isinstance(ask, Ask)
        start = perf_counter()
        logits = self._session.score(ask.tokens, ask.draft)
        scored = Scored(logits, perf_counter() - start)
        try:
            round_ = self._loop.send(scored)
        except DecodeError:
            # No next token can be drawn. Dropping the accepted tokens, too, would change the
            # distribution of the draft's tokens.
            accepted = [
                token for draft, _, verdict in self._judged for token in draft.accepted(verdict)
            ]
            if not accepted:
                raise
            context.extend(accepted)
            is_last = True
        else:
            assert isinstance(round_, Round)
            self._stage.materials.policy.observe_round(round_)
            self._n_drafted += round_.n_drafted
            self._n_accepted += round_.n_accepted
        _, probs, verdict = self._judged[0]
        rows = [0, *(node + 1 for node in verdict.nodes)][: len(context) - n_before]
        n_read = n_before + verdict.n_accepted
        return Burst(probs, rows, logits.shape[1], n_read, is_last)

    def end(self) -> None:
        """End the draft. May be called twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()  # not left to the garbage collector, which can swallow Ctrl-C

    def notes(self) -> dict[str, float]:
        if not self._n_drafted:
            return {}
        share = self._n_accepted / self._n_drafted
        return {"n_staged": self._n_drafted, "staged_acceptance": share}

    def _verify(self, draft: Draft, probs: Probs, uniforms: Uniforms) -> Verdict:
        verdict = self._stage.verify(draft, probs, uniforms)
        self._judged.append((draft, as_rows(probs), verdict))
        return verdict
