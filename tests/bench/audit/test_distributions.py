"""Quantiles are uniform, and a rule's error is found to a stated resolution."""

from __future__ import annotations

import numpy as np
import pytest
from bench.audit.conftest import lossy, of_siblings

from ggufspec.bench.audit.statistics import (
    draft_ratio,
    likeliest,
    quantile,
    rule_error,
    total_variation,
)
from ggufspec.decoding import verify

TARGET = np.array([0.5, 0.2, 0.2, 0.1, 0.0])
DRAFT = np.array([0.1, 0.5, 0.1, 0.2, 0.1])


def test_total_variation() -> None:
    assert total_variation(TARGET, DRAFT) == pytest.approx(0.5)
    assert total_variation(TARGET, TARGET) == 0


def test_quantiles_of_tokens_from_the_distribution_are_uniform() -> None:
    """40,000 of them: the mean within 5 standard errors of 0.0014, each tenth of 0.0015."""
    rng = np.random.default_rng(0)
    tokens, score = rng.choice(5, 40_000, p=TARGET), draft_ratio(TARGET, DRAFT)
    quantiles = [
        quantile(token, TARGET, score, uniform)
        for token, uniform in zip(tokens, rng.random(40_000), strict=True)
    ]
    assert np.mean(quantiles) == pytest.approx(0.5, abs=0.007)
    np.testing.assert_allclose(np.histogram(quantiles, 10, (0, 1))[0] / 40_000, 0.1, atol=0.0075)


def test_tokens_with_the_largest_draft_ratio_come_first() -> None:
    ratio = draft_ratio(TARGET, DRAFT)
    np.testing.assert_allclose(ratio, [0.2, 2.5, 0.5, 2.0, np.inf])
    assert quantile(4, TARGET, ratio, 0.5) == 0  # only the draft draws it
    assert quantile(1, TARGET, ratio, 0.5) == pytest.approx(0.1)
    assert quantile(3, TARGET, ratio, 0.5) == pytest.approx(0.25)
    assert quantile(0, TARGET, ratio, 0.5) == pytest.approx(0.75)
    assert draft_ratio(np.array([1.0, 0.0]), np.array([1.0, 0.0])).tolist() == [1, 0]


def test_a_lossless_rule_has_the_targets_distribution() -> None:
    rng = np.random.default_rng(1)
    for n_vocab in (2, 5, 32):
        target = rng.dirichlet(np.full(n_vocab, 0.5))
        draft = target * np.exp(rng.normal(0, 1, n_vocab))
        found, resolution = rule_error(verify.rule("traversal"), target, draft / draft.sum())
        assert resolution < 0.005
        assert found < 3 * resolution + 0.001


def test_siblings_that_are_taken_for_draws_with_replacement_have_an_error() -> None:
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(8, 2.0))
    draft = target * np.exp(rng.normal(0, 1, 8))
    both = likeliest(target, draft / draft.sum(), 2)
    found, resolution = rule_error(of_siblings(with_replacement=False), *both, 2)
    assert found < 3 * resolution + 0.001 < 0.008
    found, resolution = rule_error(of_siblings(with_replacement=True), *both, 2)
    assert found > 3 * resolution + 0.002
    one_hot = np.eye(5)[1]  # has no second token to draft
    assert rule_error(of_siblings(with_replacement=False), TARGET, one_hot, 2)[0] < 0.005


def test_the_error_of_a_lossy_rule_is_the_calculated_one() -> None:
    """Accepting with min(1, 1.3 target / draft): what is accepted, and what the residual adds."""
    accepted = np.minimum(DRAFT, 1.3 * TARGET)
    residual = np.maximum(TARGET - DRAFT, 0)
    outcome = accepted + (1 - accepted.sum()) * residual / residual.sum()
    found, resolution = rule_error(lossy(1.3), TARGET, DRAFT)
    assert found == pytest.approx(total_variation(outcome, TARGET), abs=3 * resolution)
    assert found > 0.05 > 10 * resolution


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
