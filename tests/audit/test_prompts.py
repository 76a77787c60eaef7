"""Prompts come from JSON lines or plain text; what is neither is refused by line and by name."""

from __future__ import annotations

import pytest

from ggufspec.audit.prompts import parse_prompts
from ggufspec.errors import PromptError


@pytest.mark.parametrize(
    ("data", "where", "prompts"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": "b\\nc", "id": 1}\n', "p.jsonl", ["a", "b\nc"]),
        (b'{"question_id": 81, "turns": ["first", "second"]}', "p", ["first"]),
        (b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n', "p.txt", ["a", "b"]),
        (b"one\ntwo\n", "p.txt", ["one", "two"]),
        (b"one\r\ntwo", "p.txt", ["one", "two"]),
        (b"one\nand more\n\n\n  \ntwo\n", "p.txt", ["one\nand more", "two"]),
        ('{ "prompt": "\u2028 h\u00e9" }'.encode(), "p.jsonl", ["\u2028 h\u00e9"]),
        (b"{ this is a text", "p.txt", ["{ this is a text"]),
    ],
)
def test_prompts(data: bytes, where: str, prompts: list[str]) -> None:
    assert parse_prompts(data, where) == prompts


@pytest.mark.parametrize(
    ("data", "where", "named"),
    [
        (b"", "p.txt", "p.txt has no prompts"),
        (b"\n \n", "p.jsonl", "no prompts"),
        (b"caf\xe9", "p.txt", "not UTF-8: byte 3 is 0xe9"),
        (b"GGUF\0\0\0", "model.gguf", "zero bytes"),
        (b"hello", "p.jsonl", "line 1 of p.jsonl is not JSON"),
        (b'{"prompt": "a"}\n{"prompt": ', "p", "line 2 of p is not JSON"),
        (b'{"prompt": "a"}\n[1]', "p", "line 2 of p is no JSON object"),
        (b'{"text": "a", "n": 1}', "p", "line 1 of p has no text in 'text', 'n'"),
        (b'{"prompt": 3}', "p", "no text in 'prompt'"),
        (b'{"prompt": ""}', "p", "no text in 'prompt'"),
        (b'{"turns": []}', "p", "no text in 'turns'"),
        (b"{}", "p", "no text in nothing"),
        (b"[" * 100_000, "p.jsonl", "line 1 of p.jsonl is not JSON"),
    ],
)
def test_what_is_no_prompts_is_refused(data: bytes, where: str, named: str) -> None:
    with pytest.raises(PromptError, match=named):
        parse_prompts(data, where)
