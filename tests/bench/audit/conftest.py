"""The tiny pair of most audits here, and a rule that is not lossless."""

from __future__ import annotations

from bisect import bisect_right
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
    last: tuple[Draft, Probs] | None = None
    limits: list[float] = []  # of the uniform that accepts each token
    sums: list[list[float]] = []  # of what is drawn where it is rejected, and at the end

    def verify(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        nonlocal last
        if last is None or last[0] is not draft or last[1] is not target_probs:
            last = (draft, target_probs)  # an integral over the uniforms has many of each
            target = np.asarray(target_probs).astype(np.float64)
            limits[:], sums[:] = [], []
            for i, token in enumerate(draft.tokens):
                drafted = np.zeros(target.shape[1])
                if draft.probs is None:
                    drafted[token] = 1
                else:
                    drafted += np.asarray(draft.probs)[i]
                limits.append(greed * target[i, token] / drafted[token])
                residual = np.maximum(target[i] - drafted, 0)
                sums.append(np.cumsum(residual if residual.any() else target[i]).tolist())
            sums.append(np.cumsum(target[-1]).tolist())
        n = len(draft.tokens)
        n_accepted = next((i for i, limit in enumerate(limits) if uniforms[i] >= limit), n)
        return Verdict(n_accepted, draw(sums[n_accepted], uniforms[min(n_accepted + 1, n)]))

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
        return Verdict(0, draw(np.cumsum(target).tolist(), uniforms[-1]), ())

    return verify


def draw(sums: Sequence[float], uniform: float) -> int:
    """A token, by the sums of the weights up to each."""
    return min(bisect_right(sums, uniform * sums[-1]), len(sums) - 1)
