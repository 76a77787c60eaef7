"""The prompts of a benchmark that is given no file, and a fair choice among many."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.bench.workloads import KINDS
from ggufspec.common.prompts import Prompt


def own_prompts() -> list[Prompt]:
    """A few texts to continue freely, and a few to copy from."""
    return [
        Prompt(id=f"{kind} {i}", category=kind, turns=(text,))
        for kind, texts in KINDS.items()
        for i, text in enumerate(texts, 1)
    ]


def spread(prompts: Sequence[Prompt], n_most: int | None) -> list[Prompt]:
    """At most `n_most` prompts: the first ones of each category, equally many of each."""
    if n_most is None or n_most >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank[prompt.category] = rank.get(prompt.category, 0) + 1
        ranked.append((rank[prompt.category], i))
    return [prompts[i] for i in sorted(i for _, i in sorted(ranked)[:n_most])]
