"""A small model drafts, token by token, with the target's sampling at its own temperature.

It never handles the KV cache: rejected tokens are simply absent from the next `tokens`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from ggufspec.common import defaults
from ggufspec.decoding.sampling import Rows, append_probs, as_rows, draw, gap
from ggufspec.decoding.types import Draft, Logits, Probs, Session, Verdict, token_array
from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.temperature import DraftTemperature
from ggufspec.errors import DecodeError, OptionError


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution."""

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._materials = materials
        self._policy = materials.policy
        sampling = materials.sampling
        wanted = materials.draft_temperature
        if wanted == "auto" and list(sampling.samplers[-1:]) != ["temperature"]:
            wanted = sampling.temperature  # what another would change is not only the last step
        self._draft_temperature = DraftTemperature(sampling.temperature, wanted)
        self._samplings = {
            temperature: replace(sampling, temperature=temperature)
            for temperature in self._draft_temperature.choices
        }
        self._rows: Rows | None = None
        self._drafted: Draft | None = None
        self._n_read: int | None = None  # tokens that were read when it was last asked
        # Of the last tokens that others wrote: the target's probability of each.
        self._unread: deque[float] = deque(maxlen=defaults.N_PROBED)
        # Under a grammar: what the first token of a draft would have been drawn from without it.
        self._free: Rows | None = None
        self._free_samplings = {
            temperature: replace(held, grammar=None)
            for temperature, held in self._samplings.items()
            if held.grammar is not None
        }
        self._n_judged = 0
        self._chance_held = self._chance_free = 0.0

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._drafted = None
        policy = self._policy
        if self._n_read is None:
            self._n_read = len(tokens) - 1  # a prompt is read ahead
        if not policy.begin(n_max, len(tokens) - self._n_read):
            if n_max == 0 or not policy.probes():
                return Draft((), why=policy.why)
            self._probe(tokens)
            if not policy.begin(n_max, 1):
                return Draft((), why=policy.why)
        return self._draft(tokens, n_max)

    def _draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        steps = self._policy.native
        sampling = self._samplings[self._draft_temperature.temperature]
        stop_tokens = self._materials.stop_tokens
        uniforms = self._materials.uniforms(n_max)
        context = array("i", tokens)
        rows = self._rows
        if rows is not None:
            rows.keep(0)
        n = 0
        while n < n_max and steps.looks():
            logits = self._session.score(context)
            if rows is None:
                rows = self._rows = Rows(self._materials.n_draft_max, logits.shape[1])
            try:
                token = draw(rows, logits, sampling, context, steps, uniforms[n])
            except DecodeError:
                if sampling.grammar is None:
                    raise
                break  # nothing can follow; if the target comes here, it will say so
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
        policy = self._policy
        self._drafted = Draft(drafted, rows if n else None, policy.expected, policy.why)
        return self._drafted

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        if draft is self._drafted:
            self._policy.learn(verdict.n_accepted, self._chances(draft, target_probs))
        if draft is not self._drafted or not draft.tokens:
            self._watch(draft, target_probs, verdict)
            return
        if self._draft_temperature.is_learning:
            self._draft_temperature.observe(draft, target_probs)
        if self._free is not None and draft.probs is not None:
            target = as_rows(target_probs)
            self._n_judged += 1
            self._chance_held += target.overlap(0, as_rows(draft.probs), 0)
            self._chance_free += target.overlap(0, self._free, 0)

    def notes(self) -> dict[str, float]:
        """The temperature that it draws at now, and what holding the draft to a grammar gains.

        That is the chance that the first token of a draft stands, with and without the grammar.
        """
        notes = {"draft_temperature": self._draft_temperature.temperature}
        if self._n_judged:
            notes["first_token_acceptance"] = self._chance_held / self._n_judged
            notes["first_token_acceptance_without_grammar"] = self._chance_free / self._n_judged
        return notes

    def _chances(self, draft: Draft, target_probs: Probs) -> Iterator[float]:
        """How likely each token that was looked at would stand if those before it did."""
        rows = self._rows
        if rows is None:
            return iter(())
        # No generator: not all is asked for, and Ctrl-C is lost in one that is thrown away.
        places = range(len(draft.tokens) + rows.has_declined)
        return map(as_rows(target_probs).overlap, places, repeat(rows), places)

    def _watch(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Somebody else wrote: keep what it takes to tell later how this draft would have done."""
        target = as_rows(target_probs)
        for i, token in enumerate(draft.tokens[: verdict.n_accepted]):
            self._unread.append(target.of(i, token))
        if verdict.next_token >= 0:
            self._unread.append(target.of(verdict.n_accepted, verdict.next_token))

    def _probe(self, tokens: Sequence[int]) -> None:
        """Read the last tokens in one batch, and tell the policy how well they could be foreseen.

        The target has drawn them; the mean of min(1, draft / target) over its draws is the chance
        that a token of this draft stands.
        """
        tokens = token_array(tokens)
        n = min(len(self._unread), len(tokens) - 1)
        ahead = tokens[len(tokens) - n :]
        logits = self._session.score(tokens[: len(tokens) - n], ahead[:-1])
        rows = Rows(n, logits.shape[1])
        sampling = self._samplings[self._draft_temperature.temperature]
        gaps, chances = [], []
        for i, of_target in enumerate(list(self._unread)[-n:]):
            append_probs(rows, logits[i : i + 1], sampling, tokens[: len(tokens) - n + i])
            gaps.append(gap(logits, i))
            chances.append(min(1.0, rows.of(i, ahead[i]) / of_target) if of_target > 0 else 0.0)
        self._n_read = len(tokens)
        self._unread.clear()
        self._policy.learn_unread(gaps, chances)

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
