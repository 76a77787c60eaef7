"""The prompts of a benchmark: texts, or the questions of Spec-Bench and MT-bench by category.

Bytes in, prompts out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ggufspec.audit.prompts import parse_prompts
from ggufspec.bench.workloads import KINDS
from ggufspec.errors import PromptError


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
    texts = parse_prompts(data, where)  # every error that there can be
    lines = [line for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    if not where.endswith((".jsonl", ".ndjson")) and not _is_object(lines[0]):
        return [Prompt(str(i), "", (text,)) for i, text in enumerate(texts, 1)]
    made = [_of_entry(json.loads(line), i, where) for i, line in enumerate(lines, 1)]
    names = [prompt.name for prompt in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PromptError(f"{where} has question_id {twice} twice; each must have its own")
    return made


def _of_entry(entry: dict[str, object], number: int, where: str) -> Prompt:
    turns = entry.get("turns") if entry.get("prompt") is None else [entry["prompt"]]
    assert isinstance(turns, list)
    wrong = [turn for turn in turns if not isinstance(turn, str) or not turn]
    if wrong:
        raise PromptError(f"line {number} of {where} has a turn that is no text, or empty")
    name, category = entry.get("question_id"), entry.get("category")
    return Prompt(
        str(number if name is None else name),
        "" if category is None else str(category),
        tuple(turns),
    )


def _is_object(line: str) -> bool:
    """Whether a file that begins with it has JSON lines; plain text may begin with a brace too."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
