"""Seeds of texts, and the comparison of a batch's settings with those of an earlier run."""

from __future__ import annotations

from ggufspec.batch.settings import as_json, differences, prompt_seed


def test_each_text_has_its_own_seed() -> None:
    seeds = [prompt_seed(s, i, t) for s in range(3) for i in range(20) for t in range(2)]
    assert len(set(seeds)) == len(seeds)
    assert prompt_seed(1, 2) == prompt_seed(1, 2, 0) == 1809754618


def test_differences_name_the_setting() -> None:
    before = {"seed": 1, "gone": None, "old": 2, "same": {"a": 1}}
    assert differences(before, {"seed": 2, "same": {"a": 1}, "new": "x" * 99}) == [
        "seed was 1, is 2",
        f'new was null, is "{"x" * 56}...',
        "old was 2, is null",
    ]


def test_settings_survive_json() -> None:
    assert as_json({"a": (1, float("-inf")), 5: 0.5}) == {"a": [1, "-inf"], "5": 0.5}
