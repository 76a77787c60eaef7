"""The tiny pair of most audits here, and a rule that is not lossless."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.decoding.types import Draft, Logits, Probs, Uniforms, Verdict, Verify
from ggufspec.engine.engine import Engine
from ggufspec.llama.session import LlamaSession

ROUNDING = 0.15  # standard deviation in logits
Plant = Callable[[Verify], None]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.write_llama(folder / "target.gguf")
    return target, tiny.write_llama(folder / "draft.gguf", n_layer=1)


@pytest.fixture(scope="module")
def pair(paths: tuple[Path, Path]) -> Iterator[Engine]:
    with ggufspec.load(*paths, n_threads=1, n_draft_max=4) as made:
        yield made


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Replaces the rule "rejection" by another one."""
    return lambda rule: monkeypatch.setattr("ggufspec.decoding.verify.rejection.verify", rule)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets batches of several tokens round coarsely, as K-quants do on CPUs."""
    honest = LlamaSession.score

    def score(
        session: LlamaSession,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
    ) -> Logits:
        n_new = len(tokens) + len(draft) - min(session.n_common(tokens), len(tokens) - 1)
        rows = np.array(honest(session, tokens, draft, parents))
        for i, row in enumerate(rows if n_new > 1 else ()):
            rng = np.random.default_rng([n_new, *tokens, *draft[:i]])
            row += ROUNDING * rng.standard_normal(len(row))
        return rows

    monkeypatch.setattr(LlamaSession, "score", score)


def lossy(greed: float) -> Verify:
    """A rule that accepts `greed` times as often as is lossless."""

    def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        target = np.asarray(target_probs).astype(np.float64)
        for i, token in enumerate(draft.tokens):
            certain = np.eye(target.shape[1])[token]
            drafted = certain if draft.probs is None else np.asarray(draft.probs)[i]
            if uniforms[i] * drafted[token] >= greed * target[i, token]:
                residual = np.maximum(target[i] - drafted, 0)
                return Verdict(i, draw(residual if residual.any() else target[i], uniforms[i + 1]))
        n_tokens = len(draft.tokens)
        return Verdict(n_tokens, draw(target[-1], uniforms[n_tokens]))

    return verify


def of_siblings(*, with_replacement: bool) -> Verify:
    """Recursive rejection of tokens that all follow the text.

    `with_replacement`: it takes each for a draw from the distribution of the first.
    """

    def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        target = np.asarray(target_probs)[0].astype(np.float64)
        assert draft.probs is not None
        for i, token in enumerate(draft.tokens):
            drafted = np.asarray(draft.probs)[0 if with_replacement else i]
            if uniforms[i] * drafted[token] < target[token]:
                return Verdict(1, 0, (i,))
            residual = np.maximum(target - drafted, 0)
            target = residual / residual.sum() if residual.any() else target
        return Verdict(0, draw(target, uniforms[-1]), ())

    return verify


def draw(weights: np.ndarray, uniform: float) -> int:
    """A token with probability proportional to its weight."""
    sums = np.cumsum(weights)
    return int(min(np.searchsorted(sums, uniform * sums[-1], side="right"), len(sums) - 1))
