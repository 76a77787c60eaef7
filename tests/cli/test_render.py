"""How results are formatted."""

from __future__ import annotations

from dataclasses import replace

from ggufspec.cli import render
from ggufspec.decoding.stats import Stats, summarize
from ggufspec.decoding.types import Round

PIECES = [b" the", b" cat", b" sat", b" dog", b" don't", b"\n", b"\xe2\x80"]


def stats(notes: dict[str, float]) -> Stats:
    return summarize(
        [],
        n_prompt=1,
        n_prompt_reused=0,
        n_generated=0,
        prompt_seconds=0.0,
        generation_seconds=0.0,
        threads={},
        notes=notes,
    )


def test_details_have_the_forced_tokens_of_a_constraint() -> None:
    shown = render.details_text(stats({"n_forced": 52, "forced_acceptance": 0.904}))
    assert "forced by the constraint: 52 tokens, 90.4% accepted" in shown
    assert "forced" not in render.details_text(stats({}))


def test_details_have_the_tokens_that_were_drafted_for_the_draft() -> None:
    shown = render.details_text(stats({"n_staged": 1, "staged_acceptance": 1.0}))
    assert "drafted for the draft: 1 token, 100.0% accepted" in shown
    assert "forced" not in shown


def test_a_round_shows_the_branches_of_its_tree() -> None:
    """The cat sat; the dog; don't: two tokens are accepted, and the line break follows them."""
    tree = Round([0, 1, 5], 5, 2, 0.003, 0.04, 0.0, 1.9, "unsure")
    tree = tree._replace(drafted_tokens=(0, 1, 2, 3, 4), parents=(-1, 0, 1, 0, -1))
    shown = render.rounds_text([tree], PIECES.__getitem__, color=False).splitlines()
    assert shown == [
        "round 1: drafted 5 in 3 branches, accepted 2 (1.9 expected), draft 3.0 ms, "
        "target 40.0 ms; unsure",
        r"  ' the cat sat' | ' the dog' | ' don\'t' -> accepted ' the cat'",
    ]
    shown = render.rounds_text([tree], PIECES.__getitem__, color=True).splitlines()
    green = "\x1b[32m{}\x1b[0m".format
    assert shown[1].startswith(f"  '{green(' the cat')} sat' | '{green(' the')} dog' | ' don")


def test_a_round_with_a_chain_has_one_line() -> None:
    chain = Round([0, 1], 3, 1, 0.003, 0.04, 0.0)
    shown = render.rounds_text([chain], PIECES.__getitem__, color=True)
    assert shown == "round 1: drafted 3, accepted 1, draft 3.0 ms, target 40.0 ms"


def test_parts_of_characters_in_a_tree_can_be_shown() -> None:
    tree = Round([6], 2, 0, 0.0, 0.0, 0.0, drafted_tokens=(6, 5), parents=(-1, -1))
    shown = render.rounds_text([tree], PIECES.__getitem__, color=False).splitlines()[1]
    assert shown == r"  '�' | '\n' -> accepted ''"


def test_the_threads_of_passes_are_shown_with_their_shares() -> None:
    one = replace(stats({}), threads={"target": {2: 1.5}, "draft": {}})
    assert "threads: target 2\n" in render.details_text(one) + "\n"
    several = replace(stats({}), threads={"target": {1: 0.25, 2: 0.75}, "draft": {1: 0.5}})
    assert "threads: target 2 (75%), 1 (25%), draft 1" in render.details_text(several)
