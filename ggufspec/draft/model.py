"""A small model drafts, one token after the other, by the same sampling as the target.

Knows its session and its coins. Hears of no cache: what the target rejected is simply not in the
next `tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ggufspec.core import Draft, Probs, Session, Verdict, first_rows
from ggufspec.draft import Materials
from ggufspec.errors import OptionError
from ggufspec.sampling import pick, to_probs


class ModelDrafter:
    """Draws each token from the draft model's distribution, and keeps that distribution."""

    def __init__(self, session: Session, materials: Materials) -> None:
        self._session = session
        self._materials = materials
        self._probs: list[Probs] = []  # views of (n_max, n_vocab), reused every round
        self._rows: list[Probs] = []  # and of each row, (1, n_vocab)

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        if n_max == 0:
            return Draft(())
        sampling, stop_tokens = self._materials.sampling, self._materials.stop_tokens
        coins = self._materials.coins(n_max)
        context = array("i", tokens)
        for i in range(n_max):
            logits = self._session.score(context)
            if len(self._rows) < n_max:
                self._make_room(n_max, logits.shape[1])
            token = pick(to_probs(logits, sampling, out=self._rows[i]), coins[i])
            context.append(token)
            if token in stop_tokens:
                break
        drafted = context[len(tokens) :].tolist()
        return Draft(drafted, self._probs[len(drafted)])

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        pass

    def _make_room(self, n_max: int, n_vocab: int) -> None:
        probs = np.empty((n_max, n_vocab), np.float32)
        self._probs = first_rows(probs)
        self._rows = [probs[i : i + 1] for i in range(n_max)]


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None:
        raise OptionError("the drafter 'model' needs a draft model; name one with draft= (--draft)")
    return ModelDrafter(materials.session, materials)
