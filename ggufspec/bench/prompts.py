"""The prompts of a benchmark that is given no file, and a fair choice among many."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.common.prompts import Prompt

OPEN = (
    "The coach left the village before it was light, and nobody but the old miller saw who sat in",
    "My uncle never spoke of the summer when the river rose, but one evening after supper he",
    '"You are late," said the countess without turning from the window. The young man',
)

_COUNTRY = "and I have been in the country, "
_CONTENTS = "1. . . . 2. . . . 3. . . .\n"
_FUNCTION = (
    "def add(first, second):\n    total = first + second\n    print(total)\n    return total\n\n"
)

# Short, since the embedded pair was trained on windows of 256 tokens. It continues the first two at
# temperature 0, and the second also at 0.7, but not the code.
REPETITIVE = (
    f"I have been in the house, {4 * _COUNTRY}and I",
    3 * _CONTENTS + "1.",
    2 * _FUNCTION + "def add(first, second):\n    total =",
)

KINDS = {"open": OPEN, "repetitive": REPETITIVE}


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
