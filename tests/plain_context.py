"""Contexts in which what is right differs by rounding only, and what is compared with it.

The caches hold 32-bit floats and attention is computed the plain way. Logits deviate by about 3
from their mean; batches of different shapes were seen to round them apart by 5e-5, in one logit by
2e-3, while one token missing, doubled or misplaced moves them by more than 0.05.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from ggufspec.decoding.types import Logits
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession

WRITERS: dict[str, Callable[..., Path]] = {
    "llama": tiny.write_llama,
    "swa": tiny.write_swa,
    "mamba": tiny.write_mamba,
    "hybrid": tiny.write_hybrid,
    "qwen35": tiny.write_qwen35,
}
TOLERANCE = 1e-2
N_VOCAB = len(tiny.SPM)

Tokens = list[int]
Alone = Callable[..., Logits]  # of tokens and a draft


def models(*kinds: str) -> Any:
    """A fixture of loaded models of these kinds, each loaded once for a module."""

    @pytest.fixture(scope="module", params=kinds)
    def model(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Model]:
        path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
        with closing(Model(WRITERS[request.param](path))) as loaded:
            yield loaded

    return model


def plain_context(model: Model, **options: Any) -> Context:
    plain = {"flash_attention": "off", "type_k": "f32", "type_v": "f32"}
    return Context(model, ContextOptions(**{"n_threads": 1, **plain, **options}))


@contextmanager
def alone(model: Model, **options: Any) -> Iterator[Alone]:
    """The logits of a new session, in a context of its own whose memory was just emptied."""
    with closing(plain_context(model, **options)) as context:

        def score(tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
            session = LlamaSession(context)
            session.forget()
            return session.score(tokens, draft).copy()

        yield score


def assert_same(rows: Logits, wanted: Logits) -> None:
    assert rows.shape == wanted.shape
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=TOLERANCE)


class Texts:
    """Texts that are likely to share a beginning with an earlier one, each with a draft."""

    def __init__(self, seed: int, n_ctx: int, n_rows: int) -> None:
        self.random = random.Random(seed)
        self._n_ctx, self._n_rows = n_ctx, n_rows
        self.text, self.draft = self.some(20), self.some(4)
        self._earlier = [self.text]

    def some(self, n: int) -> Tokens:
        return [self.random.randrange(3, N_VOCAB) for _ in range(n)]

    def next(self) -> tuple[Tokens, Tokens]:
        pick, text = self.random, self.text
        n_accepted = pick.randint(0, len(self.draft))
        following: Callable[[], Tokens] = pick.choices(
            [
                lambda: [*text, *self.draft[:n_accepted], *self.some(1)],
                lambda: list(text),
                lambda: text[: pick.randint(1, len(text))],
                lambda: text[: pick.randint(0, len(text) - 1)] + self.some(pick.randint(1, 30)),
                lambda: list(pick.choice(self._earlier)),
                lambda: self.some(pick.choice([1, 2, 32, 150])),
            ],
            weights=[12, 1, 2, 2, 2, 1],
        )[0]
        self.text = following()[: self._n_ctx - self._n_rows]
        self.draft = self.some(pick.choice([0, 1, 2, 4, self._n_rows - 1]))
        self._earlier.append(self.text)
        return self.text, self.draft
