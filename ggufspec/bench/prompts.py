"""Built-in prompts, and a choice of prompts that is spread over categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ggufspec.common.prompts import Prompt
from ggufspec.common.toml import read_toml

_TEXTS = read_toml(Path(__file__).with_suffix(".toml"))
KINDS: Mapping[str, Sequence[str]] = {kind: _TEXTS[kind] for kind in ("open", "repetitive")}
# For each half of the texts of `trim`: (kind, text that the target continues).
REFERENCE: Sequence[Sequence[tuple[str, str]]] = _TEXTS["reference"]


def own_prompts() -> list[Prompt]:
    """The built-in prompts: some for free continuation, some with text to repeat."""
    return [
        Prompt(id=f"{kind} {i}", category=kind, turns=(text,))
        for kind, texts in KINDS.items()
        for i, text in enumerate(texts, 1)
    ]


def spread(prompts: Sequence[Prompt], n_most: int | None) -> list[Prompt]:
    """At most `n_most` prompts: the first ones of each category, the same number of each."""
    if n_most is None or n_most >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank[prompt.category] = rank.get(prompt.category, 0) + 1
        ranked.append((rank[prompt.category], i))
    return [prompts[i] for i in sorted(i for _, i in sorted(ranked)[:n_most])]
