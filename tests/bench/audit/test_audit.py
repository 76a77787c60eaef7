"""An audit passes lossless rules, and refuses what cannot be audited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.bench.audit import PROMPTS, AuditOptions, audit
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.errors import ClosedError, OptionError, PromptError

SMALL = AuditOptions(n_runs=6, n_tokens=12, seed=0)
NO_TREES = replace(SMALL, tree="off")  # the test of a rule takes most of its time for siblings


# Lossless


def test_a_lossless_pair_passes_and_a_seed_repeats_the_report(pair: Engine) -> None:
    heard: list[tuple[str, int, int]] = []
    report = audit(pair, PROMPTS, SMALL, progress=lambda *told: heard.append(told))
    assert report.differences == ()
    assert report.verdict.startswith("No difference was found; a mean shift of 0.2")
    assert report.rule.n_positions == 8
    assert report.batch.n_positions == 6 * 12
    sequences = report.sequences
    assert sequences.n_tokens_plain == sequences.n_tokens_speculative == 6 * 12
    assert 0 < sequences.n_accepted < sequences.n_drafted
    assert len(sequences.tests) == 5
    assert heard[7] == ("Generating at temperature 0", 8, 8)
    assert ("Generating texts both ways", 6, 6) in heard
    assert heard[-1] == ("Testing the rule", 8, 8)
    assert audit(pair, PROMPTS, SMALL) == report
    fresh = audit(pair, PROMPTS, replace(SMALL, seed=None, options={"temperature": 0.0}))
    assert fresh.settings.seed is not None
    assert (fresh.batch, fresh.rule, fresh.sequences, fresh.greedy.n_texts) == (None, None, None, 6)


SAMPLERS: list[GenerateOptions] = [
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.5},
    {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    {"samplers": ("min_p", "adaptive_p"), "adaptive_target": 0.4},
    {"samplers": ("top_k", "xtc", "adaptive_p"), "adaptive_target": 0.3, "xtc_probability": 0.5},
]


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_every_sampler_passes_with_the_state_that_each_text_has(
    pair: Engine, options: GenerateOptions
) -> None:
    """A wrong state would give tokens that have no chance, or another rounding."""
    report = audit(pair, PROMPTS, replace(NO_TREES, options=options))
    assert report.differences == ()
    assert report.sequences.n_impossible == (0, 0)


def test_texts_that_end_early_pass(pair: Engine) -> None:
    """At this temperature all tokens are equally likely, so that some texts end early."""
    options: GenerateOptions = {"temperature": 50.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    hot = replace(NO_TREES, n_tokens=60, options=options)
    report = audit(pair, PROMPTS, hot)
    assert report.differences == ()
    assert 0 < report.sequences.n_tokens_plain < 6 * 60


def test_the_rounds_of_a_stream_have_the_token_that_ends_it(tmp_path: Path) -> None:
    end = 2
    story = tiny.write_timed(tmp_path / "story.gguf", [10, 11, 12, end], n_prompt=1)
    with ggufspec.load(story, story, n_threads=1) as made:
        stream = made.stream([1], temperature=0)
        for _ in stream:
            pass
    assert [token for round_ in stream.rounds for token in round_.tokens] == [10, 11, 12, end]
    assert stream.completion.tokens == (10, 11, 12)


# What it uses


@pytest.mark.parametrize("writer", [tiny.write_llama, tiny.write_mamba])
def test_logits_of_a_text_are_those_of_its_prefixes(writer: object, tmp_path: Path) -> None:
    path = writer(tmp_path / "model.gguf")  # type: ignore[operator]
    prompt, text = [1, 9, 8], [7, 6, 5, 9, 9]
    with ggufspec.load(path, path, n_threads=1, n_draft_max=2) as made:
        singles = np.concatenate(list(scoring.logits(made, prompt, text, whose="target")))
        pieces = list(scoring.logits(made, prompt, text, whose="target", n_together=3))
        drafts = np.concatenate(list(scoring.logits(made, prompt, text, whose="draft")))
        assert [len(piece) for piece in pieces] == [3, 2]
        np.testing.assert_allclose(np.concatenate(pieces), singles, atol=0.02)
        np.testing.assert_allclose(drafts, singles, atol=0.02)
        last = next(scoring.logits(made, [*prompt, *text[:-1]], text[-1:], whose="target"))
        np.testing.assert_allclose(last, singles[-1:], atol=0.02)


def test_logits_that_cannot_be_had_are_refused(pair: Engine, paths: tuple[Path, Path]) -> None:
    for how in ({"whose": "oracle"}, {"whose": "draft", "n_together": 2}):
        with pytest.raises(OptionError):
            next(scoring.logits(pair, [1], [2], **how))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="it is 1 to 5"):
        next(scoring.logits(pair, [1], [2], whose="target", n_together=6))
    with ggufspec.load(paths[0], n_threads=1) as alone, pytest.raises(OptionError):
        next(scoring.logits(alone, [1], [2], whose="draft"))
    with pytest.raises(ClosedError):
        next(scoring.logits(alone, [1], [2], whose="target"))


# What is refused


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_tokens": 1},
        {"alpha": 0.5},
        {"near_tie": float("nan")},
        {"seed": -1},
        {"verify": "telepathy"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        AuditOptions(**wrong)  # type: ignore[arg-type]


def test_prompts_that_make_no_sense_are_refused(pair: Engine) -> None:
    for prompts, named in (
        ([], "there are no prompts"),
        (["a", [5] * (pair.n_ctx - 5)], "prompt 2 has"),
    ):
        with pytest.raises(PromptError, match=named):
            audit(pair, prompts, SMALL)


def test_an_audit_needs_a_draft_and_room_for_it(pair: Engine, paths: tuple[Path, Path]) -> None:
    alone = ggufspec.load(paths[0], n_threads=1)
    with alone, pytest.raises(OptionError, match="needs a draft model"):
        audit(alone, PROMPTS, SMALL)
    few = audit(pair, PROMPTS, replace(NO_TREES, n_runs=1, n_tokens=2))
    assert "there are too few texts to find one" in few.verdict
    with pytest.raises(OptionError, match="loaded for at most 4"):
        audit(pair, PROMPTS, replace(SMALL, n_draft=5))


def test_the_length_that_run_chooses_can_be_audited(pair: Engine) -> None:
    report = audit(pair, PROMPTS, replace(NO_TREES, n_runs=4, n_tokens=20, n_draft="auto"))
    assert report.differences == ()
    assert report.settings.drafter == "auto"
