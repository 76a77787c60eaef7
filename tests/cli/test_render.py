"""How results are formatted."""

from __future__ import annotations

from ggufspec.cli import render
from ggufspec.decoding.stats import Stats, summarize


def stats(notes: dict[str, float]) -> Stats:
    return summarize(
        [],
        n_prompt=1,
        n_prompt_reused=0,
        n_generated=0,
        prompt_seconds=0.0,
        generation_seconds=0.0,
        decode_seconds=0.0,
        notes=notes,
    )


def test_details_have_the_forced_tokens_of_a_constraint() -> None:
    shown = render.details_text(stats({"n_forced": 52, "forced_acceptance": 0.904}))
    assert "forced by the constraint: 52 tokens, 90.4% accepted" in shown
    assert "forced" not in render.details_text(stats({"draft_temperature": 0.8}))
