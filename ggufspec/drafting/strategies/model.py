"""Drafts token by token with a small model, with the target's sampling at its own temperature."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Rows, append_probs, as_rows, draw, gap, to_probs
from ggufspec.decoding.types import Draft, Logits, Probs, Session, Verdict, token_array
from ggufspec.drafting.draft_length import Action
from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.temperature import DraftTemperature
from ggufspec.errors import DecodeError, OptionError

USES_MODEL = True  # the draft model reads each prompt ahead


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution."""

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._materials = materials
        self._policy = materials.policy
        sampling = materials.sampling
        wanted = materials.draft_temperature
        if wanted == "auto" and list(sampling.samplers[-1:]) != ["temperature"]:
            wanted = sampling.temperature  # "auto" assumes that the temperature comes last
        self._draft_temperature = DraftTemperature(sampling.temperature, wanted)
        self._samplings = {
            temperature: replace(sampling, temperature=temperature)
            for temperature in self._draft_temperature.choices
        }
        self._rows: Rows | None = None
        self._drafted: Draft | None = None
        self._n_read: int | None = None  # tokens that the draft model had read after its last draft
        # The target's probability of each of the last tokens that this drafter did not propose.
        self._unread: deque[float] = deque(maxlen=defaults.N_PROBED)
        # With a grammar: the distribution of a draft's first token without it.
        self._free: Rows | None = None
        self._free_samplings = {
            temperature: replace(constrained, grammar=None)
            for temperature, constrained in self._samplings.items()
            if constrained.grammar is not None
        }
        self._n_first_tokens = 0
        self._acceptance = self._free_acceptance = 0.0  # sums over first tokens

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._drafted = None
        policy = self._policy
        if self._n_read is None:
            self._n_read = len(tokens) - 1  # the prompt was read ahead
        action = policy.start_round(n_max, len(tokens) - self._n_read)
        if action is Action.PROBE:
            self._probe(tokens)
            action = policy.start_round(n_max, 1)
        if action is Action.DRAFT:
            return self._draft(tokens, n_max)
        return Draft((), why=policy.why)

    def _draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        policy = self._policy
        rule = policy.rule
        sampling = self._samplings[self._draft_temperature.temperature]
        stop_tokens = self._materials.stop_tokens
        uniforms = self._materials.uniforms(n_max)
        context = array("i", tokens)
        rows = self._rows
        if rows is not None:
            rows.keep(0)
        n = 0
        while n < n_max and rule.should_evaluate():
            logits = self._session.score(context)
            if rows is None:
                rows = self._rows = Rows(self._materials.n_draft_max, logits.shape[1])
            try:
                token = draw(rows, logits, sampling, context, rule, uniforms[n])
            except DecodeError:
                if sampling.grammar is None:
                    raise
                break  # nothing can follow; if the target gets here, its pass raises the error
            if n == 0 and sampling.grammar is not None:
                self._remember_free(logits, context)
            if token < 0:
                break
            context.append(token)
            n += 1
            if token in stop_tokens:
                break
        self._n_read = len(context)
        self._unread.clear()
        drafted = context[len(tokens) :].tolist()
        self._drafted = Draft(drafted, rows if n else None, policy.expected, policy.why)
        return self._drafted

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        if draft is self._drafted:
            self._policy.observe_verdict(verdict.n_accepted, self._acceptances(draft, target_probs))
        if draft is not self._drafted or not draft.tokens:
            self._remember_unread(draft, target_probs, verdict)
            return
        if self._draft_temperature.is_learning:
            self._draft_temperature.observe(draft, target_probs)
        if self._free is not None and draft.probs is not None:
            target = as_rows(target_probs)
            self._n_first_tokens += 1
            self._acceptance += target.overlap(0, as_rows(draft.probs), 0)
            self._free_acceptance += target.overlap(0, self._free, 0)

    def notes(self) -> dict[str, float]:
        """The current draft temperature, and what constraining the draft by a grammar gains.

        That is the acceptance rate of a draft's first token, with and without the grammar.
        """
        notes = {"draft_temperature": self._draft_temperature.temperature}
        n = self._n_first_tokens
        if n:
            notes["first_token_acceptance"] = self._acceptance / n
            notes["first_token_acceptance_without_grammar"] = self._free_acceptance / n
        return notes

    def _acceptances(self, draft: Draft, target_probs: Probs) -> Iterator[float]:
        """The acceptances for LengthPolicy.observe_verdict, one per computed distribution."""
        rows = self._rows
        if rows is None:
            return iter(())
        # Not a generator: not all values are used, and closing one early can swallow Ctrl-C.
        positions = range(len(draft.tokens) + rows.has_declined)
        return map(as_rows(target_probs).overlap, positions, repeat(rows), positions)

    def _remember_unread(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Keep what a later probe needs of tokens that this drafter did not propose."""
        target = as_rows(target_probs)
        for i, token in enumerate(draft.tokens[: verdict.n_accepted]):
            self._unread.append(target.of(i, token))
        if verdict.next_token >= 0:
            self._unread.append(target.of(verdict.n_accepted, verdict.next_token))

    def _probe(self, tokens: Sequence[int]) -> None:
        """Read the last tokens in one batch, and report how well the draft model predicts them.

        The target drew them: the mean of min(1, draft / target) over its draws is the probability
        that a drafted token is accepted.
        """
        tokens = token_array(tokens)
        n = min(len(self._unread), len(tokens) - 1)
        before, after = tokens[: len(tokens) - n], tokens[len(tokens) - n :]
        logits = self._session.score(before, after[:-1])
        sampling = self._samplings[self._draft_temperature.temperature]
        rows = to_probs(logits, sampling, before, after[:-1])
        gaps, acceptances = [], []
        for i, target_prob in enumerate(list(self._unread)[-n:]):
            gaps.append(gap(logits, i))
            draft_prob = rows.of(i, after[i])
            acceptances.append(min(1.0, draft_prob / target_prob) if target_prob > 0 else 0.0)
        self._n_read = len(tokens)
        self._unread.clear()
        self._policy.observe_probe(gaps, acceptances)

    def _remember_free(self, logits: Logits, context: Sequence[int]) -> None:
        if self._free is None:
            self._free = Rows(1, logits.shape[1])
        self._free.keep(0)
        append_probs(
            self._free, logits, self._free_samplings[self._draft_temperature.temperature], context
        )


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
