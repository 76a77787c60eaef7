"""Drafts with a small model: with the target's sampling, but a temperature for drafts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

from ggufspec.decoding.sampling import Rows, Sampling, as_rows, draw
from ggufspec.decoding.types import (
    BlockSession,
    Draft,
    Probs,
    Session,
    Uniforms,
    Verdict,
    n_same,
    token_array,
)
from ggufspec.drafting.bursts import Bursts
from ggufspec.drafting.draft_length import Action
from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.tree_growth import Growth
from ggufspec.errors import ConstraintError, DecodeError, NoRoomError, OptionError

USES_MODEL = True  # the draft model may read a prompt before the first round


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution.

    First it drafts a chain, then branches beside it (tree_growth.py); no branches in a round that a
    constraint restricts, or if the target reads chains only. Once the draft model has failed, it
    drafts only forced tokens.
    """

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._blocks = session if isinstance(session, BlockSession) else None
        self._bursts = None if materials.stage is None else Bursts(session, materials.stage)
        self._materials = materials
        self._policy = materials.policy
        sampling = materials.sampling
        if materials.draft_temperature is not None:
            sampling = replace(sampling, temperature=materials.draft_temperature)
        self._sampling = sampling
        self._rows: Rows | None = None
        self._drafted: Draft | None = None
        self._n_before = 0  # length of the text in the last round
        self._n_read: int | None = None  # tokens of the text that the draft model has read
        self._context = array("i")  # the text and the drafted tokens that may have been read
        self._forced = materials.forced
        self._drawn: list[int] = []  # positions in the draft whose distributions were computed
        self._growth: Growth | None = None  # the tree of the last draft
        policy, tree = self._policy, materials.tree
        wants = tree == "on" or (tree == "auto" and not policy.is_fixed)
        self._branches = materials.n_leaves > 1 and wants
        self._is_free = True  # whether this round's tokens may be any

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        has_read_more, self._drafted, self._growth = self._drafted is not None, None, None
        self._forced.start_round()
        policy, constraint = self._policy, self._sampling.constraint
        self._is_free = constraint is None or constraint.n_free(tokens) > n_max
        is_new, self._n_before = len(tokens) <= self._n_before, len(tokens)
        if self._n_read is None or is_new:
            # The tokens of the prompt, or of the text that remains in the context, that were read.
            self._n_read = len(tokens) - 1 - policy.n_prompt_unread
        elif has_read_more:
            n_same_read = n_same(self._context, token_array(tokens))
            self._n_read = min(self._n_read, n_same_read, len(tokens) - 1)
        action = policy.start_round(n_max, len(tokens) - self._n_read)
        if action is Action.PLAIN:
            return Draft((), why=policy.why)
        return self._draft(tokens, n_max, may_evaluate=action is Action.DRAFT)

    def _draft(self, tokens: Sequence[int], n_max: int, *, may_evaluate: bool) -> Draft:
        """The draft, with `policy`'s length. Forced text is added without a draft step."""
        policy = self._policy
        sampling = self._sampling
        context = self._context = array("i", tokens)
        n_end = len(tokens) + n_max
        if may_evaluate and self._bursts is not None:
            self._bursts.start(context, sampling, n_end, policy.n_reachable)
        uniforms = self._materials.uniforms(n_max) if may_evaluate else ()
        if self._rows is not None:
            self._rows.keep(0)
        self._drawn = []
        while len(context) < n_end:
            if not self._is_free and (not self._append_forced(n_end) or len(context) >= n_end):
                break
            if self._growth is not None and self._growth.is_better_beside():
                break
            if not may_evaluate or not policy.should_evaluate():
                break
            try:
                if self._bursts is None:
                    goes_on = self._append_token(sampling, uniforms)
                else:
                    goes_on = self._append_burst(self._bursts, uniforms)
            except (NoRoomError, ConstraintError):
                break  # no token of the draft's vocabulary may follow; the target may have others
            except DecodeError as error:
                policy.give_up(error)
                break
            if not goes_on or context[-1] in self._materials.stop_tokens:
                break
        if self._bursts is not None:
            self._bursts.end()
        drafted: Sequence[int] = context[len(tokens) :].tolist()
        parents: Sequence[int] = ()
        if not self._drawn:
            return Draft(drafted, None, policy.expected, policy.why)
        if self._growth is not None:
            try:
                self._growth.grow(tokens, sampling, self._session.score)
            except DecodeError as error:
                policy.give_up(error)
            drafted, parents, held = self._growth.result
            context[len(tokens) :] = array("i", [drafted[node] for node in held])
            self._n_read = len(context)
        probs = self._rows if drafted else None
        self._drafted = Draft(drafted, probs, policy.expected, policy.why, parents)
        return self._drafted

    def _append_token(self, sampling: Sampling, uniforms: Uniforms) -> bool:
        """Append a token of the draft model, unless the policy declines; returns whether it did."""
        context, policy = self._context, self._policy
        logits = self._session.score(context)
        self._n_read = len(context)
        if self._blocks is not None:
            policy.foresee(self._blocks.gaps(context, policy.n_max - policy.n_drawn))
        rows, n = self._rows_for(logits.shape[1]), len(context) - self._n_before
        growth = self._growth_for(rows, uniforms)
        token = draw(rows, logits, sampling, context, policy, uniforms[n])
        self._drawn.append(n)
        if token >= 0:
            context.append(token)
            if growth is not None:
                growth.add_to_chain(token, policy.reached)
        return token >= 0

    def _append_burst(self, bursts: Bursts, uniforms: Uniforms) -> bool:
        """Append as many tokens of a burst as the policy allows; returns whether to draft on."""
        context, policy, start = self._context, self._policy, len(self._context)
        burst = bursts.write(context)
        rows = self._rows_for(burst.n_vocab, start)
        growth = self._growth_for(rows, uniforms)
        n_taken = 0
        for row in burst.rows:
            if n_taken and not policy.should_evaluate():
                break
            rows.append_from(burst.probs, row)
            self._drawn.append(start + n_taken - self._n_before)
            if not policy.should_draw(burst.probs.gap(row)):
                rows.decline()
                break
            if growth is not None:
                growth.add_to_chain(context[start + n_taken], policy.reached)
            n_taken += 1
        del context[start + n_taken :]
        self._n_read = min(burst.n_read, len(context))
        return n_taken == len(burst.rows) and not burst.is_last

    def _rows_for(self, n_vocab: int, n_context: int | None = None) -> Rows:
        """The distributions of the draft; when they are created, all its tokens so far are certain.

        `n_context`: number of tokens so far, with the text; None: all of the context.
        """
        if self._rows is None:
            self._rows = Rows(self._materials.n_draft_max, n_vocab)
            for token in self._context[self._n_before : n_context]:
                self._rows.append_certain(token)
        return self._rows

    def _growth_for(self, rows: Rows, uniforms: Uniforms) -> Growth | None:
        if self._branches and self._is_free and self._growth is None:
            self._growth = Growth(self._materials, rows, uniforms)
        return self._growth

    def _append_forced(self, n_end: int) -> bool:
        """Append the forced tokens worth verifying; returns whether to draft after them."""
        context, n_before = self._context, len(self._context)
        forced = self._forced.after(context)
        n_taken = self._policy.take(self._forced.probabilities(forced)[: n_end - n_before])
        context.extend(forced[:n_taken])
        self._forced.drafted(n_before - self._n_before, n_taken)
        if self._rows is not None:
            for token in forced[:n_taken]:
                self._rows.append_certain(token)
        return n_taken == len(forced) and not self._forced.is_over(context)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        self._forced.observe(draft, target_probs, verdict)
        target, forced = as_rows(target_probs), self._forced.positions
        path = verdict.nodes
        # Where n-grams were accepted, the text repeats itself: its gaps do not predict later ones.
        first = 0 if draft is self._drafted else verdict.n_accepted
        chosen = [i for i in (0, *(node + 1 for node in path))[first:] if i not in forced]
        if self._policy.learns:
            self._policy.observe_gaps([target.gap(i) for i in chosen])
        if draft is not self._drafted:
            return
        rows, n_accepted = self._rows, verdict.n_accepted_of_chain
        assert rows is not None
        nodes: Sequence[int] = self._drawn
        if self._growth is not None:
            nodes = self._growth.rows_of(self._drawn)
        n_accepted = sum(i < min(n_accepted, len(draft.tokens)) for i in self._drawn)
        n_learned = n_accepted + 1 if self._policy.learns else 0
        acceptances = map(target.overlap, self._drawn[:n_learned], repeat(rows), nodes)
        self._policy.observe_verdict(n_accepted, list(acceptances))

    def notes(self) -> dict[str, float]:
        staged = {} if self._bursts is None else self._bursts.notes()
        return {**self._forced.notes(), **staged}


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
