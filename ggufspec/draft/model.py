"""A small model drafts, one token after the other, by the target's sampling at its own temperature.

Knows its session and its coins. Hears of no cache: what the target rejected is simply not in the
next `tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ggufspec.core import Draft, Logits, Probs, Session, Verdict
from ggufspec.draft import Materials
from ggufspec.errors import DecodeError, OptionError
from ggufspec.sampling import Rows, append_probs, as_rows
from ggufspec.warmth import Warmth


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution."""

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._materials = materials
        sampling = materials.sampling
        wanted = materials.draft_temperature
        if wanted == "auto" and list(sampling.samplers[-1:]) != ["temperature"]:
            wanted = sampling.temperature  # what another would change is not only the last step
        self._warmth = Warmth(sampling.temperature, wanted)
        self._samplings = {
            temperature: replace(sampling, temperature=temperature)
            for temperature in self._warmth.choices
        }
        self._rows: Rows | None = None
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
        if n_max == 0:
            return Draft(())
        sampling = self._samplings[self._warmth.temperature]
        stop_tokens = self._materials.stop_tokens
        coins = self._materials.coins(n_max)
        context = array("i", tokens)
        rows = self._rows
        if rows is not None:
            rows.clear()
        for i in range(n_max):
            logits = self._session.score(context)
            if rows is None:
                rows = self._rows = Rows(self._materials.n_draft_max, logits.shape[1])
            try:
                append_probs(rows, logits, sampling, context)
            except DecodeError:
                if sampling.grammar is None:
                    raise
                break  # nothing can follow; if the target comes here, it will say so
            if i == 0 and sampling.grammar is not None:
                self._remember_free(logits, context)
            token = rows.pick(i, coins[i])
            context.append(token)
            if token in stop_tokens:
                break
        return Draft(context[len(tokens) :].tolist(), rows)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        if not draft.tokens:
            return
        if self._warmth.is_learning:
            self._warmth.observe(draft, target_probs)
        if self._free is not None and draft.probs is not None:
            target = as_rows(target_probs)
            self._n_judged += 1
            self._chance_held += target.overlap(0, as_rows(draft.probs), 0)
            self._chance_free += target.overlap(0, self._free, 0)

    def notes(self) -> dict[str, float]:
        """The temperature that it draws at now, and what holding the draft to a grammar gains.

        That is the chance that the first token of a draft stands, with and without the grammar.
        """
        notes = {"draft_temperature": self._warmth.temperature}
        if self._n_judged:
            notes["first_token_acceptance"] = self._chance_held / self._n_judged
            notes["first_token_acceptance_without_grammar"] = self._chance_free / self._n_judged
        return notes

    def _remember_free(self, logits: Logits, context: Sequence[int]) -> None:
        if self._free is None:
            self._free = Rows(1, logits.shape[1])
        self._free.clear()
        append_probs(self._free, logits, self._free_samplings[self._warmth.temperature], context)


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
