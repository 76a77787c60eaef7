"""Seeds of the texts of a batch."""

from __future__ import annotations

from ggufspec.batch.run import prompt_seed


def test_each_text_has_its_own_seed() -> None:
    seeds = [prompt_seed(s, i, t) for s in range(3) for i in range(20) for t in range(2)]
    assert len(set(seeds)) == len(seeds)
    assert prompt_seed(1, 2) == prompt_seed(1, 2, 0) == 1809754618
