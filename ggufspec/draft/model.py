"""A small model drafts, one token after the other, by the target's sampling at its own temperature.

Knows its session and its coins. Hears of no cache: what the target rejected is simply not in the
next `tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ggufspec.core import Draft, Probs, Session, Verdict
from ggufspec.draft import Materials
from ggufspec.errors import OptionError
from ggufspec.sampling import Rows, append_probs
from ggufspec.warmth import Warmth


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution."""

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._materials = materials
        self._warmth = Warmth(materials.sampling.temperature, materials.draft_temperature)
        self._samplings = {
            temperature: replace(materials.sampling, temperature=temperature)
            for temperature in self._warmth.choices
        }
        self._rows: Rows | None = None

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
            append_probs(rows, logits, sampling, context)
            token = rows.pick(i, coins[i])
            context.append(token)
            if token in stop_tokens:
                break
        return Draft(context[len(tokens) :].tolist(), rows)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        if draft.tokens and self._warmth.is_learning:
            self._warmth.observe(draft, target_probs)


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
