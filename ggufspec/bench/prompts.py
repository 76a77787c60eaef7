"""The prompts of a benchmark: texts, or the questions of Spec-Bench and MT-bench by category.

Bytes in, prompts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.bench.workloads import KINDS
from ggufspec.common.prompts import Entry, parse_entries, without_text
from ggufspec.errors import PromptError

_NEEDED = 'each line needs a text "prompt", or a list of texts "turns"'


@dataclass(frozen=True)
class Prompt:
    """What is continued, or answered: `turns` are what the user says, one after the other."""

    name: str
    category: str
    turns: Sequence[str]
    system: str | None = None


def own_prompts() -> list[Prompt]:
    """Those that need no file: a few texts to continue freely, and a few to copy from."""
    return [
        Prompt(f"{kind} {i}", kind, (text,))
        for kind, texts in KINDS.items()
        for i, text in enumerate(texts, 1)
    ]


def spread(prompts: Sequence[Prompt], n_most: int | None) -> list[Prompt]:
    """At most so many of them: of every category as many as of any other, the first ones."""
    if n_most is None or n_most >= len(prompts):
        return list(prompts)
    rank: dict[str, int] = {}
    ranked = []
    for i, prompt in enumerate(prompts):
        rank[prompt.category] = rank.get(prompt.category, 0) + 1
        ranked.append((rank[prompt.category], i))
    return [prompts[i] for i in sorted(i for _, i in sorted(ranked)[:n_most])]


def prompts_of(data: bytes, where: str) -> list[Prompt]:
    """The prompts in a file's bytes. `where` names the file in errors.

    JSON lines with "turns" (Spec-Bench, MT-bench), all of which are asked, or "prompt"; with
    "category" and "question_id" where they have them. Or plain text, as `ggufspec audit` reads it.
    Raises PromptError.
    """
    entries = parse_entries(data, where, _NEEDED)
    made = [_of_entry(entry, i) for i, entry in enumerate(entries, 1)]
    names = [prompt.name for prompt in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PromptError(f"{where} has question_id {twice} twice; each must have its own")
    return made


def _of_entry(entry: Entry, number: int) -> Prompt:
    fields = entry.fields
    turns = fields.get("turns") if fields.get("prompt") is None else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise without_text(entry, _NEEDED)
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise PromptError(f"{entry.where} has a turn that is no text, or empty")
    name, category = fields.get("question_id"), fields.get("category")
    return Prompt(
        str(number if name is None else name),
        "" if category is None else str(category),
        tuple(turns),
    )
