"""Places are uniform, and a rule's law is found to a stated resolution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ggufspec.audit.distributions import distance, law_of_rule, likeliest, place, temptation
from ggufspec.decoding import verify
from ggufspec.decoding.types import Draft, Verdict

TARGET = np.array([0.5, 0.2, 0.2, 0.1, 0.0])
DRAFT = np.array([0.1, 0.5, 0.1, 0.2, 0.1])


def rules() -> list[str]:
    return verify.names()


def test_a_distance() -> None:
    assert distance(TARGET, DRAFT) == pytest.approx(0.5)
    assert distance(TARGET, TARGET) == 0


@pytest.mark.parametrize("score", [TARGET, temptation(TARGET, DRAFT)], ids=["target", "ratio"])
def test_places_of_the_laws_own_tokens_are_uniform(score: np.ndarray) -> None:
    """40,000 of them: the mean within 5 standard errors of 0.0014, each tenth of 0.0015."""
    rng = np.random.default_rng(0)
    tokens = rng.choice(5, 40_000, p=TARGET)
    places = [
        place(token, TARGET, score, uniform)
        for token, uniform in zip(tokens, rng.random(40_000), strict=True)
    ]
    assert np.mean(places) == pytest.approx(0.5, abs=0.007)
    np.testing.assert_allclose(np.histogram(places, 10, (0, 1))[0] / 40_000, 0.1, atol=0.0075)


def test_tokens_that_tempt_come_first() -> None:
    ratio = temptation(TARGET, DRAFT)
    np.testing.assert_allclose(ratio, [0.2, 2.5, 0.5, 2.0, np.inf])
    assert place(4, TARGET, ratio, 0.5) == 0  # impossible, and the draft's
    assert place(1, TARGET, ratio, 0.5) == pytest.approx(0.1)
    assert place(3, TARGET, ratio, 0.5) == pytest.approx(0.25)
    assert place(0, TARGET, ratio, 0.5) == pytest.approx(0.75)
    assert temptation(np.array([1.0, 0.0]), np.array([1.0, 0.0])).tolist() == [1, 0]


@pytest.mark.parametrize("name", rules())
def test_honest_rules_have_the_targets_law(name: str) -> None:
    rng = np.random.default_rng(1)
    for n_vocab in (2, 5, 32):
        target = rng.dirichlet(np.full(n_vocab, 0.5))
        draft = target * np.exp(rng.normal(0, 1, n_vocab))
        found, resolution = law_of_rule(verify.rule(name), target, draft / draft.sum())
        assert resolution < 0.005
        assert found < 3 * resolution + 0.001


def test_a_greedy_rules_law_is_off_by_what_arithmetic_says() -> None:
    """Accepting with min(1, 1.3 target / draft): what is accepted, and what the residual adds."""
    accepted = np.minimum(DRAFT, 1.3 * TARGET)
    residual = np.maximum(TARGET - DRAFT, 0)
    law = accepted + (1 - accepted.sum()) * residual / residual.sum()
    found, resolution = law_of_rule(verify.rule("_lossy"), TARGET, DRAFT)
    assert found == pytest.approx(distance(law, TARGET), abs=3 * resolution)
    assert found > 0.05 > 10 * resolution


def test_a_rule_that_replaces_by_the_target_is_off() -> None:
    def from_target(draft: Draft, target_probs: np.ndarray, uniforms: Sequence[float]) -> Verdict:
        token, row = draft.tokens[0], target_probs[0]
        assert draft.probs is not None
        if uniforms[0] * draft.probs[0][token] < row[token]:
            return Verdict(1, 0)
        return Verdict(0, int(np.searchsorted(np.cumsum(row), uniforms[1] * row.sum(), "right")))

    found, resolution = law_of_rule(from_target, TARGET, DRAFT)
    assert found > 0.1 > 10 * resolution


def test_the_likeliest_by_either_are_kept() -> None:
    rng = np.random.default_rng(2)
    target, draft = rng.dirichlet(np.full(1000, 0.05), 2)
    kept_target, kept_draft = likeliest(target, draft)
    assert len(kept_target) == len(kept_draft) <= 32
    assert kept_target.sum() == pytest.approx(1)
    assert kept_draft.sum() == pytest.approx(1)
    ratio = np.sort(kept_target)[-2:] / np.sort(target)[-2:]
    assert ratio[0] == pytest.approx(ratio[1])
    one_hot = np.eye(1000)[7]
    assert likeliest(one_hot, np.full(1000, 0.001))[0].max() == 1
