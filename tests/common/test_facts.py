"""Facts as plain JSON, and the comparison of two sets of them."""

from __future__ import annotations

from pathlib import Path

from ggufspec.common.facts import differences, plain


def test_differences_name_the_fact_and_both_values() -> None:
    before = {"seed": 1, "gone": None, "old": 2, "same": {"a": 1}, "load": {"n_ctx": 64}}
    now = {"seed": 2, "same": {"a": 1}, "load": {"n_ctx": 96}, "new": "x" * 99}
    assert list(differences(before, now)) == [
        "seed was 1, is 2",
        "gone was null, is not given",
        "old was 2, is not given",
        "load.n_ctx was 64, is 96",
        f'new was not given, is "{"x" * 56}...',
    ]


def test_facts_survive_json() -> None:
    made = plain({"a": (1, float("-inf")), 5: 0.5, "at": Path("x\udcff")})
    assert made == {"a": [1, "-inf"], "5": 0.5, "at": "x\\udcff"}
