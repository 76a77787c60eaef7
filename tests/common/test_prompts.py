"""Files of prompts: JSON lines or plain text. Errors name the line and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ggufspec.common.prompts import TEXTS, Prompt, digest, parse_prompts
from ggufspec.errors import PromptError

HELLO = [{"role": "user", "content": "hello"}]


def lines(*entries: object) -> bytes:
    return "\n".join(map(json.dumps, entries)).encode()


@pytest.mark.parametrize(
    ("data", "where", "prompts"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": "b\\nc", "id": 9}\n', "p.jsonl", ["a", "b\nc"]),
        (b'{"question_id": 81, "turns": ["first", "second"]}', "p", ["first"]),
        (b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n', "p.txt", ["a", "b"]),
        (b"one\ntwo\n", "p.txt", ["one", "two"]),
        (b"one\nand more\n\n\n  \ntwo\n", "p.txt", ["one\nand more", "two"]),
        ('{ "prompt": "\u2028 h\u00e9" }'.encode(), "p.jsonl", ["\u2028 h\u00e9"]),
        (b"{ this is a text", "p.txt", ["{ this is a text"]),
    ],
)
def test_json_lines_and_plain_text(data: bytes, where: str, prompts: list[str]) -> None:
    assert [prompt.turns[0] for prompt in parse_prompts(data, where)] == prompts


def test_every_form() -> None:
    data = lines(
        {"prompt": "a", "id": "x"},
        {"turns": ["b", "c"], "question_id": 81, "category": "writing", "reference": ["2"]},
        {"messages": [{**HELLO[0], "name": "ignored"}]},
        {"question_id": None, "category": None, "turns": ["d"]},
    )
    found = parse_prompts(data, "p.jsonl")
    assert found == [
        Prompt(0, turns=("a",), id="x"),
        Prompt(1, "turns", turns=("b", "c"), id=81, id_name="question_id", category="writing"),
        Prompt(2, "messages", messages=tuple(HELLO)),
        Prompt(3, "turns", turns=("d",)),
    ]
    assert [prompt.name for prompt in found] == ["x", "81", "3", "4"]


def test_forms_that_a_command_does_not_use_are_ignored() -> None:
    both = lines({"prompt": "a", "messages": HELLO})
    assert parse_prompts(both, "p.jsonl", TEXTS) == [Prompt(turns=("a",))]
    with pytest.raises(
        PromptError, match=r"has no text in 'messages'; each line needs a text \S+ "
    ):
        parse_prompts(lines({"messages": HELLO}), "p.jsonl", TEXTS)


def test_a_prompt_survives_json() -> None:
    data = lines({"messages": HELLO}, {"turns": ["\ud800"], "category": "a"})
    for prompt in parse_prompts(data, "p.jsonl"):
        assert Prompt.of_document(json.loads(json.dumps(asdict(prompt)))) == prompt


def test_the_digest_depends_on_the_prompts_and_their_order() -> None:
    a, b, c = ({"prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "id": 1})
    digests = [digest(parse_prompts(lines(*x), "p")) for x in ([a, b], [b, a], [a], [c], [a, b])]
    assert digests[0] == digests[4]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("data", "where", "named"),
    [
        (b"", "p.txt", "p.txt has no prompts: it is empty"),
        (b"caf\xe9", "p.txt", "not UTF-8: byte 3 is 0xe9"),
        (b"GGUF\0\0\0", "model.gguf", "zero bytes"),
        (b"hello", "p.jsonl", "line 1 of p.jsonl is not JSON"),
        (b'{"prompt": "a"}\n{"prompt": ', "p", "line 2 of p is not JSON"),
        (b'{"prompt": "a"}\n[1]', "p", "line 2 of p is not a JSON object"),
        (b"[" * 100_000, "p.jsonl", "line 1 of p.jsonl is not JSON"),
    ],
)
def test_files_that_cannot_be_used(data: bytes, where: str, named: str) -> None:
    with pytest.raises(PromptError, match=named):
        parse_prompts(data, where)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ([{"text": "a", "n": 1}], "line 1 of p.jsonl has no text in 'text', 'n'; each line needs"),
        ([{}], "no text in nothing"),
        ([{"prompt": "a"}, {"prompt": ""}], "line 2 of p.jsonl has no text in 'prompt'"),
        ([{"turns": []}], "no text in 'turns'"),
        ([{"turns": ["a", ""]}], "line 1 of p.jsonl has a turn that is empty or not a text"),
        ([{"messages": []}], "no conversation"),
        ([{"messages": [{"role": "user"}]}], "message 1 of line 1 of p.jsonl cannot be used"),
        ([{"prompt": "a", "turns": ["a"]}], "has prompt and turns; give one"),
        ([{"prompt": "a", "id": [1]}], "has id .1.; give a text"),
        ([{"prompt": "a", "id": True}], "has id True"),
        (
            [{"prompt": "a", "id": 7}, {"prompt": "b"}, {"prompt": "c", "id": "7"}],
            "id 7 twice, for prompts 1 and 3",
        ),
    ],
)
def test_lines_that_cannot_be_used(entries: list[object], named: str) -> None:
    with pytest.raises(PromptError, match=named):
        parse_prompts(lines(*entries), "p.jsonl")
