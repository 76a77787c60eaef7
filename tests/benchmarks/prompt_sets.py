"""Makes two sets of chat prompts of six kinds from Spec-Bench and HumanEval, in mixed order.

    python -m tests.benchmarks.prompt_sets show --spec-bench FILE --humaneval FILE -o show.jsonl

`record` is for tuning (`tests.benchmarks.record`), `show` for results (`tests.benchmarks.auto`);
they share no prompt. Sources: question.jsonl of hemingkx/Spec-Bench (data/spec_bench), and
HumanEval.jsonl.gz of openai/human-eval (data).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

_SEED = 18
_N_OF_KIND = {"record": 34, "show": 12}
_MOST_CHARACTERS = 1500
_MOST_OF_SUMMARIES = 48  # the shortest ones
_CATEGORIES = {
    "writing": ("writing", "roleplay", "humanities", "stem", "reasoning"),
    "qa": ("qa", "translation"),
    "math": ("math_reasoning", "math"),
}
_SUMMARIES = ("summarization", "extraction")
_FUNCTION = "Complete this Python function:\n```python\n{}```"
_EDIT = "{}\n```python\n{}```"
_EDITS = (
    "Add type hints to this code, and change nothing else. Answer with the whole code.",
    "Rename all variables to more descriptive names. Answer with the whole code.",
    "Add a line of logging at the start of the function. Answer with the whole code.",
    "Rewrite this code with a class that has the function as a method. Answer with the whole code.",
    "Handle None as an argument by raising ValueError. Answer with the whole code.",
    "Fix the formatting, and add a comment to each block. Answer with the whole code.",
)
_EDITABLE = range(301, 1500)  # characters of the code to edit


class KindPrompt(NamedTuple):
    """A prompt, and what kind of text it asks for."""

    kind: str
    text: str

    @property
    def name(self) -> str:
        """The same for the same prompt in every file."""
        return f"{crc32(self.text.encode()):08x}"


def read(path: Path) -> list[KindPrompt]:
    """The prompts of a file with lines of {"kind": ..., "prompt": ...}."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [KindPrompt(line["kind"], line["prompt"]) for line in lines]


def prompt_sets(
    questions: Sequence[Mapping[str, object]], problems: Sequence[Mapping[str, str]]
) -> dict[str, list[KindPrompt]]:
    """Both sets; the kinds alternate. HumanEval's even problems are in `record` only."""
    rng = random.Random(_SEED)
    sets: dict[str, list[list[KindPrompt]]] = {name: [] for name in _N_OF_KIND}
    for kind, halves in _candidates(questions, problems).items():
        for texts in halves:
            rng.shuffle(texts)
        first, *rest = halves
        n_first = _N_OF_KIND["record"]
        last = rest[0] if rest else first[n_first:]
        for name, texts in (("record", first), ("show", last)):
            sets[name].append([KindPrompt(kind, text) for text in texts[: _N_OF_KIND[name]]])
    return {
        name: [prompt for row in zip(*kinds, strict=False) for prompt in row]
        for name, kinds in sets.items()
    }


def _candidates(
    questions: Sequence[Mapping[str, object]], problems: Sequence[Mapping[str, str]]
) -> dict[str, list[list[str]]]:
    """The texts of each kind: one list to divide, or a list for each set."""
    found = {}
    for kind, categories in _CATEGORIES.items():
        texts = _first_turns(questions, categories)
        found[kind] = [[text for text in texts if len(text) <= _MOST_CHARACTERS]]
    by_length = sorted(_first_turns(questions, _SUMMARIES), key=len)
    found["summary"] = [by_length[:_MOST_OF_SUMMARIES]]
    code = [_FUNCTION.format(problem["prompt"]) for problem in problems]
    found["code"] = [code[0::2], code[1::2]]
    edits: list[list[str]] = [[], []]
    for i, problem in enumerate(problems):
        whole = problem["prompt"] + problem["canonical_solution"]
        if len(whole) in _EDITABLE:
            edits[i % 2].append(_EDIT.format(_EDITS[i % len(_EDITS)], whole))
    found["edit"] = edits
    return found


def _first_turns(questions: Sequence[Mapping[str, object]], categories: Sequence[str]) -> list[str]:
    found = []
    for question in questions:
        if question["category"] in categories:
            turns = question["turns"]
            assert isinstance(turns, list)
            found.append(str(turns[0]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one of the sets."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.prompt_sets")
    parser.add_argument("name", choices=list(_N_OF_KIND))
    parser.add_argument("--spec-bench", type=Path, required=True, help="its question.jsonl")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl.gz")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    with gzip.open(options.humaneval, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    questions = options.spec_bench.read_text(encoding="utf-8").splitlines()
    made = prompt_sets([json.loads(line) for line in questions], problems)[options.name]
    lines = (json.dumps({"kind": prompt.kind, "prompt": prompt.text}) for prompt in made)
    options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
