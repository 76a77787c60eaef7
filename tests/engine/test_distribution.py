"""Texts of an engine have the target's distribution: so many that a wrong rule is detected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from chi_square import chi_square
from server.dialects import HELLO, OPENED

import ggufspec
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import to_probs
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions

PROMPT = [1, 40]
N_TOKENS, N_TEXTS = 3, 500  # the first tokens of a text, which are counted
SAMPLED: Any = {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
# Draws from the target where a draft is rejected, and not from the residual distribution.
WRONG_RULE = """
import numpy as np
from ggufspec.decoding.types import Verdict
from ggufspec.decoding.verify import rule

def verify(draft, target_probs, uniforms):
    right = rule("rejection")(draft, target_probs, uniforms)
    sums = np.cumsum(np.asarray(target_probs)[right.n_accepted])
    return Verdict(right.n_accepted, int(np.searchsorted(sums, uniforms[-1] * sums[-1])))
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With a draft so near to the target that wrong rules show."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.write_llama(folder / "target.gguf")
    draft = tiny.write_llama(folder / "draft.gguf", perturb=0.2)
    with ggufspec.load(target, draft, n_ctx=64, n_threads=1, tuned=False) as made:
        yield made


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Its template opens the reasoning, whose end is one token."""
    folder = tmp_path_factory.mktemp("models")
    vocab = tiny.BPE.with_token("</think>", gguf.TokenType.USER_DEFINED)
    how: Any = {"chat_template": OPENED, "vocab": vocab}
    target = tiny.write_llama(folder / "target.gguf", **how)
    draft = tiny.write_llama(folder / "draft.gguf", perturb=0.2, **how)
    with ggufspec.load(target, draft, n_ctx=256, n_threads=1, tuned=False) as made:
        yield made


def distribution(
    engine: Engine, prompt: Sequence[int], n_tokens: int, options: Any
) -> dict[tuple[int, ...], float]:
    """The probability of every text."""
    found = {(): 1.0}
    sampling = engine.prepare(prompt, CheckedOptions.of(options)).sampling
    for _ in range(n_tokens):
        longer = {}
        for text, p in found.items():
            tokens = [*prompt, *text]
            (row,) = scoring.logits(engine, tokens, [0], whose="target")
            probs = np.asarray(to_probs(row, sampling, tokens))[0]
            longer.update({(*text, int(x)): p * float(probs[x]) for x in np.flatnonzero(probs)})
        found = longer
    return found


def counted(
    engine: Engine, prompt: Sequence[int] = PROMPT, n_tokens: int = N_TOKENS, **options: Any
) -> tuple[float, float]:
    """The statistic of as many texts, and its limit."""
    how = {**SAMPLED, "max_tokens": n_tokens + 2, "drafter": "model", **options}
    texts = [engine.generate(prompt, seed=seed, **how) for seed in range(N_TEXTS)]
    counts = Counter(text.tokens[:n_tokens] for text in texts)
    has_branches = any(text.stats.n_drafted > sum(text.stats.drafted_by_position) for text in texts)
    assert has_branches == ("tree" in options)
    law = distribution(engine, prompt, n_tokens, how)
    assert set(counts) <= set(law), "nothing impossible was written"
    return chi_square(counts, law)


@pytest.mark.parametrize("options", [{"n_draft": 2}, {"n_draft": 4, "tree": "on"}], ids=str)
def test_texts_have_the_targets_distribution(engine: Engine, options: Any) -> None:
    """All rules and drafters: tests/drafting/test_exact_distribution.py, test_exact_blocks.py."""
    statistic, limit = counted(engine, **options)
    assert statistic < limit


def test_so_they_have_where_the_end_of_reasoning_is_forced(reasoner: Engine) -> None:
    """The second token is the end; trees are drafted behind it."""
    options: Any = {"n_draft": 4, "tree": "on", "reasoning_budget": 1, "max_tokens": 9}
    options |= {"temperature": 2.0}  # the model is surer than that of the other texts
    statistic, limit = counted(reasoner, reasoner.render(HELLO), 4, **options)
    assert statistic < limit


def test_so_many_texts_detect_a_wrong_rule(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG_RULE)
    monkeypatch.setattr(verify, "__path__", [*verify.__path__, str(tmp_path)])
    statistic, limit = counted(engine, n_draft=2, verify="wrong")
    assert statistic > limit
