"""An audit finds planted faults, and only those, in the real loop with real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench.audit.conftest import Plant, lossy, of_siblings

import ggufspec
from ggufspec.bench.audit import PROMPTS, AuditOptions, AuditReport, audit
from ggufspec.bench.audit.report import AuditedDivergence, Greedy
from ggufspec.decoding import verify
from ggufspec.decoding.types import Draft, Logits, Probs, Uniforms, Verdict
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.llama import kernels
from ggufspec.llama.session import LlamaSession
from ggufspec.standin import embedded as demo

# Without trees, which take most of the time of the test of a rule.
SMALL = AuditOptions(n_runs=6, n_tokens=12, seed=0, tree="off", verify="rejection")
# The embedded pair agrees so often that faults show: 58 % of its drafts are accepted.
OPEN: GenerateOptions = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LARGE = replace(SMALL, n_runs=30, n_tokens=32, options=OPEN)
TIE = AuditedDivergence(prompt=0, position=3, tokens=(5, 6), gap=0.01)


def loaded(flash_attention: str) -> Engine:
    target, draft = demo.embedded_target(), demo.embedded_draft()
    how: Any = {"n_threads": 1, "n_ctx": 256, "n_draft_max": 3}
    return ggufspec.load(target, draft, flash_attention=flash_attention, **how)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    """With llama.cpp's attention: batches may round in their own way."""
    with loaded("off") as made:
        yield made


def test_a_lossy_rule_is_found_by_its_distribution(pair: Engine, plant: Plant) -> None:
    plant(lossy(1.3))
    report = audit(pair, PROMPTS, SMALL)
    assert report.rule.found
    assert "the next-token distribution of rule rejection is off by" in report.verdict


def test_a_rule_that_is_lossy_for_siblings_only_is_found(pair: Engine, plant: Plant) -> None:
    """It takes the second sibling for a draw with replacement; chains have none."""
    chains, siblings = verify.rule("rejection"), of_siblings(with_replacement=True)

    def rule(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        return (siblings if draft.parents else chains)(draft, target_probs, uniforms)

    plant(rule)
    report = audit(pair, PROMPTS, replace(SMALL, n_runs=1, n_tokens=3, tree="auto"))
    assert report.rule.found


def test_a_target_that_reads_a_tree_as_a_chain_is_found(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LlamaSession.score

    def score(
        session: LlamaSession,
        tokens: Sequence[int],
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
    ) -> Logits:
        return honest(session, tokens, draft)

    monkeypatch.setattr(LlamaSession, "score", score)
    for tree, is_found in (("auto", True), ("off", False)):
        report = audit(pair, PROMPTS, replace(SMALL, n_runs=2, tree=tree))
        assert report.batch.found is is_found


def test_a_lossy_rule_is_found_by_its_texts(embedded: Engine, plant: Plant) -> None:
    """Accepting twice as often shifts by about 0.08; 0.058 is found with 90 % power here."""
    plant(lossy(2.0))
    report = audit(embedded, PROMPTS, LARGE)
    shift = report.sequences.tests[0]
    assert shift in report.sequences.found
    assert shift.effect < 0  # towards what the draft prefers
    assert shift.high is not None
    assert shift.high < 0
    assert "the sampled texts differ: mean shift, by draft/target ratio" in report.verdict


def test_plain_texts_do_not_depend_on_the_audited_rule(pair: Engine, plant: Plant) -> None:
    """A rule that sharpens the target's distribution, also where nothing was drafted."""
    honest = verify.rule("match")

    def sharpened(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        rows = np.asarray(target_probs) ** 2
        return honest(draft, rows / rows.sum(axis=1, keepdims=True), uniforms)

    plant(sharpened)
    report = audit(pair, PROMPTS, replace(SMALL, n_runs=12))
    assert report.rule.found
    assert report.sequences.found


def test_a_rule_that_accepts_everything_is_found_at_temperature_0(
    pair: Engine, plant: Plant
) -> None:
    def accept(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        return Verdict(len(draft.tokens), int(np.asarray(target_probs)[-1].argmax()))

    plant(accept)
    report = audit(pair, PROMPTS, replace(SMALL, options={"temperature": 0.0}))
    assert report.greedy.found
    assert "diverge without a near-tie" in report.verdict


def batches_off_by(error: float) -> Callable[..., Iterator[Logits]]:
    """`scoring.logits`, but with an error of the logits of several tokens."""
    honest = scoring.logits

    def off(*args: Any, n_together: int = 1, **how: Any) -> Iterator[Logits]:
        for rows in honest(*args, n_together=n_together, **how):
            if n_together > 1:
                rows[:, ::2] += error
            yield rows

    return off


def test_a_batch_that_computes_something_else_is_found(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "logits", batches_off_by(0.3))
    report = audit(pair, PROMPTS, replace(SMALL, n_runs=2))
    assert report.batch.found
    assert "batches change the target's distribution" in report.verdict


@pytest.mark.usefixtures("rounding")
def test_of_batches_that_round_coarsely_only_larger_faults_are_found(
    embedded: Engine, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(LARGE, n_runs=2)
    report = audit(embedded, PROMPTS[:3], few)
    assert 0.01 < report.batch.median < 2 * report.batch.resolution
    assert any(each.gap > LARGE.near_tie for each in report.greedy.divergences)
    assert report.differences == ()

    def second(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        return Verdict(0, int(np.asarray(target_probs)[0].argsort()[-2 if draft.tokens else -1]))

    with monkeypatch.context() as patched:
        patched.setattr(scoring, "logits", batches_off_by(2.0))
        report = audit(embedded, PROMPTS[:1], few)
        assert report.batch.found
    plant(second)
    report = audit(embedded, PROMPTS[:3], replace(SMALL, options={"temperature": 0.0}))
    assert report.greedy.near_tie > SMALL.near_tie
    assert report.greedy.found


@pytest.mark.skipif(
    kernels.attention_refusal() is not None, reason="own attention cannot be used here"
)
def test_where_our_kernels_compute_everything_no_change_of_a_bit_is_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(LARGE, n_runs=2)
    with loaded("own") as exact:
        report = audit(exact, PROMPTS[:2], few)
        assert report.differences == ()
        assert report.batch.largest == report.batch.resolution == 0
        assert report.greedy == Greedy(2, None, ())
        monkeypatch.setattr(scoring, "logits", batches_off_by(1e-3))
        assert audit(exact, PROMPTS[:1], few).batch.found
    other = AuditReport(few, 1, None, None, None, Greedy(1, None, (replace(TIE, gap=0.0),)))
    assert "1 of 1 greedy texts diverge" in other.verdict


def test_a_divergence_at_a_near_tie_is_no_difference() -> None:
    same = AuditReport(SMALL, 2, None, None, None, Greedy(2, 0.05, (TIE,)))
    assert same.differences == ()
    assert same.verdict.endswith("1 of 2 greedy texts are identical, 1 diverge at near-ties.")
    other = replace(same, greedy=Greedy(2, 0.05, (TIE, replace(TIE, gap=0.06))))
    assert len(other.greedy.found) == 1


def test_the_gap_of_a_divergence_is_that_of_the_logits(pair: Engine, plant: Plant) -> None:
    def stubborn(draft: Draft, target_probs: Probs, uniforms: Uniforms) -> Verdict:
        if not draft.tokens:  # as in plain decoding
            return Verdict(0, int(np.asarray(target_probs)[0].argmax()))
        return Verdict(0, 7)

    plant(stubborn)
    (found,) = audit(
        pair, [[1, 5]], replace(SMALL, options={"temperature": 0.0})
    ).greedy.divergences
    (row,) = next(scoring.logits(pair, [1, 5], [0], whose="target"))
    assert found.position == 0
    assert found.tokens == (int(row.argmax()), 7)
    assert found.gap == pytest.approx(float(row.max() - row[7]), abs=1e-2)
