"""Drafts token by token with a small model, with the target's sampling at its own temperature."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Rows, as_rows, draw, gap, to_probs
from ggufspec.decoding.types import Draft, Probs, Session, Verdict, token_array
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
        self._forced = materials.forced
        self._drawn: list[int] = []  # positions in the draft whose distributions were computed

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._drafted = None
        self._forced.start_round()
        policy = self._policy
        if self._n_read is None:
            self._n_read = len(tokens) - 1  # the prompt was read ahead
        action = policy.start_round(n_max, len(tokens) - self._n_read)
        if action is Action.PROBE:
            self._probe(tokens)
            action = policy.start_round(n_max, 1)
        if action is Action.PLAIN:
            return Draft((), why=policy.why)
        return self._draft(tokens, n_max, may_evaluate=action is Action.DRAFT)

    def _draft(self, tokens: Sequence[int], n_max: int, *, may_evaluate: bool) -> Draft:
        """Forced text costs no draft step, also behind drawn tokens."""
        policy = self._policy
        rule = policy.rule
        sampling = self._samplings[self._draft_temperature.temperature]
        stop_tokens = self._materials.stop_tokens
        uniforms = self._materials.uniforms(n_max) if may_evaluate else ()
        context = array("i", tokens)
        rows = self._rows
        if rows is not None:
            rows.keep(0)
        self._drawn = []
        n = 0
        while n < n_max:
            if sampling.constraint is not None:
                n_forced, goes_on = self._append_forced(context, n, n_max - n)
                if n_forced and rows is not None:
                    for token in context[-n_forced:]:
                        rows.append_certain(token)
                n += n_forced
                if not goes_on or n >= n_max:
                    break
            if not may_evaluate or not rule.should_evaluate():
                break
            logits = self._session.score(context)
            self._n_read = len(context)
            if rows is None:
                rows = self._rows = Rows(self._materials.n_draft_max, logits.shape[1])
                for token in context[len(tokens) :]:
                    rows.append_certain(token)
            self._drawn.append(n)
            try:
                token = draw(rows, logits, sampling, context, rule, uniforms[n])
            except DecodeError:
                if sampling.constraint is None:
                    raise
                self._drawn.pop()
                break  # nothing can follow; if the target gets here, its pass raises the error
            if token < 0:
                break
            context.append(token)
            self._n_read = len(context)
            n += 1
            if token in stop_tokens:
                break
        drafted = context[len(tokens) :].tolist()
        if not self._drawn:
            return Draft(drafted, None, policy.expected, policy.why)
        self._unread.clear()
        self._drafted = Draft(drafted, rows if n else None, policy.expected, policy.why)
        return self._drafted

    def _append_forced(self, context: array[int], n: int, n_most: int) -> tuple[int, bool]:
        """Append the forced tokens that are worth a pass: how many, and whether to draft behind."""
        forced = self._forced.after(context)
        n_taken = self._policy.rule.take(self._forced.probabilities(forced)[:n_most])
        context.extend(forced[:n_taken])
        self._forced.drafted(n, n_taken)
        return n_taken, n_taken == len(forced) and not self._forced.is_over(context)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        self._forced.observe(draft, target_probs, verdict)
        if draft is not self._drafted:
            self._remember_unread(draft, target_probs, verdict)
            return
        n_accepted = sum(i < min(verdict.n_accepted, len(draft.tokens)) for i in self._drawn)
        self._policy.observe_verdict(n_accepted, self._acceptances(target_probs))
        if not draft.tokens:
            self._remember_unread(draft, target_probs, verdict)
        elif self._draft_temperature.is_learning:
            self._draft_temperature.observe(draft, target_probs)

    def notes(self) -> dict[str, float]:
        """The current draft temperature, and what became of forced tokens."""
        temperature = self._draft_temperature.temperature
        return {"draft_temperature": temperature, **self._forced.notes()}

    def _acceptances(self, target_probs: Probs) -> Iterator[float]:
        """The acceptances for LengthPolicy.observe_verdict, one per computed distribution."""
        rows = self._rows
        if rows is None:
            return iter(())
        # Not a generator: not all values are used, and closing one early can swallow Ctrl-C.
        return map(as_rows(target_probs).overlap, self._drawn, repeat(rows), self._drawn)

    def _remember_unread(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Keep what a later probe needs of tokens that this drafter did not propose."""
        target = as_rows(target_probs)
        for i, token in enumerate(draft.tokens[: verdict.n_accepted]):
            is_forced = i in self._forced.positions  # says nothing of the draft model
            self._unread.append(math.nan if is_forced else target.of(i, token))
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
            if math.isnan(target_prob):
                continue
            gaps.append(gap(logits, i))
            draft_prob = rows.of(i, after[i])
            acceptances.append(min(1.0, draft_prob / target_prob) if target_prob > 0 else 0.0)
        self._n_read = len(tokens)
        self._unread.clear()
        self._policy.observe_probe(gaps, acceptances)


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
