"""What a line of a file asks for, and what is refused by line and by name."""

from __future__ import annotations

import json

import pytest

from ggufspec.batch.prompts import Prompt, digest, parse_prompts
from ggufspec.errors import PromptError

HELLO = [{"role": "user", "content": "hello"}]


def lines(*entries: object) -> bytes:
    return "\n".join(map(json.dumps, entries)).encode()


def test_what_may_be_asked_for() -> None:
    data = lines(
        {"prompt": "a", "id": "x"},
        {"turns": ["b", "c"], "question_id": 81, "category": "writing"},
        {"messages": [{**HELLO[0], "name": "ignored"}]},
    )
    assert parse_prompts(data, "p.jsonl") == [
        Prompt(0, "prompt", texts=("a",), id="x"),
        Prompt(1, "turns", texts=("b", "c"), id=81, id_name="question_id"),
        Prompt(2, "messages", messages=tuple(HELLO)),
    ]


def test_plain_text() -> None:
    found = parse_prompts(b"one\nand more\n\ntwo\n", "p.txt")
    assert [prompt.texts for prompt in found] == [("one\nand more",), ("two",)]


def test_a_prompt_survives_a_pipe() -> None:
    for prompt in parse_prompts(lines({"messages": HELLO}, {"turns": ["\ud800"]}), "p.jsonl"):
        assert Prompt.of_document(json.loads(json.dumps(prompt.to_document()))) == prompt


def test_the_digest_tells_prompts_apart() -> None:
    a, b, c = ({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "id": 1})
    digests = [digest(parse_prompts(lines(*x), "p")) for x in ([a, b], [b, a], [a], [c], [a, b])]
    assert digests[0] == digests[4]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([], "p.jsonl has no prompts"),
        ([{"text": "a"}], "line 1 of p.jsonl has no text in 'text'"),
        ([{"prompt": "a"}, {"prompt": ""}], "line 2 of p.jsonl has no text in 'prompt'"),
        ([{"prompt": ["a"]}], "no text in 'prompt'"),
        ([{"turns": []}], "no text in 'turns'"),
        ([{"turns": "ab"}], "no text in 'turns'"),
        ([{"turns": ["a", ""]}], "a turn that is no text, or empty"),
        ([{"messages": []}], "no conversation"),
        ([{"messages": "hi"}], "no conversation"),
        ([{"messages": [{"role": "user"}]}], "message 1 of line 1 of p.jsonl is none"),
        ([{"prompt": "a", "turns": ["a"]}], "has prompt and turns; give one"),
        ([{"prompt": "a", "id": [1]}], "has id .1.; give a text"),
        ([{"prompt": "a", "id": True}], "has id True"),
        ([{"prompt": "a", "id": 7}, {"prompt": "b"}, {"prompt": "c", "id": 7}], "7 twice, in its"),
    ],
)
def test_what_is_no_prompt_is_refused(entries: list[object], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        parse_prompts(lines(*entries), "p.jsonl")
