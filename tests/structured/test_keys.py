"""No object has a key twice, no text ends where only such keys could follow, and nothing else
is forbidden."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from ggufspec.errors import ConstraintError
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable

PIECES = [
    *'{}[]":, ab\\01',
    *('": ', ", ", '{"', '"a', '"a"', '"b": ', '"a": 1', ', "', ', "a', ', "ab": 0', '"}', "ab"),
    *(': 1, "a": ', '": {"', '": 1}', '1, "b', '["a", "', '"a": {"a": ', '": "a", "', '\\b"'),
]
END = len(PIECES)
TABLE = TokenTable(
    [*(piece.encode() for piece in PIECES), b"<end>"],
    special=[END],
    stop_tokens=[END],
    tokenize=lambda before, text: [PIECES.index(char) for char in text.decode()],
)
OBJECT = {"type": "object"}
PATTERN = {"^(a|ab|b)$": {"const": 1}}
CLOSED = {"additionalProperties": False}
SCHEMAS: dict[str, dict[str, object]] = {
    "any object": OBJECT,
    "any JSON": {},
    "typed": {"type": "object", "additionalProperties": {"enum": [0, 1]}},
    "beside a property": {"properties": {"a": {}}, "additionalProperties": OBJECT, **OBJECT},
    "in a list": {"type": "array", "items": OBJECT},
    "few names": {"patternProperties": PATTERN, **CLOSED, **OBJECT},
    "few names, all needed": {"patternProperties": PATTERN, "minProperties": 1, **CLOSED, **OBJECT},
    "many names": {"patternProperties": {"^[ab]{2}$": {}}, **CLOSED, **OBJECT},
    "one of two": {"anyOf": [{"patternProperties": PATTERN, **CLOSED}, OBJECT], **OBJECT},
    "nested": {"patternProperties": {"^a": {"patternProperties": PATTERN, **CLOSED}}, **OBJECT},
}


def constraint_of(schema: dict[str, object], n_start: int = 0) -> GrammarConstraint:
    return GrammarConstraint(TABLE, grammar.of_json_schema(schema), n_start)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_key_is_repeated_and_every_text_can_go_on(name: str) -> None:
    rng, n_objects = random.Random(name), 0
    for _ in range(8):
        constraint, tokens = constraint_of(SCHEMAS[name]), list[int]()
        for _ in range(60):
            choice = allowed(constraint.masks(tokens)[0])
            assert choice, text_of(tokens)
            ends = [
                token
                for token in choice
                if token == END or PIECES[token] in '}"'[len(tokens) < 25 :]
            ]
            token = rng.choice(ends if ends and len(tokens) > 15 else choice)
            if token == END:
                break
            tokens.append(token)
        if constraint.is_over(tokens) or constraint.n_allowed(tokens, [END]):
            n_objects += isinstance(json.loads(text_of(tokens), object_pairs_hook=object_of), dict)
    assert n_objects or name in ("in a list", "any JSON")


KEYS = ("a", "ab", "b")
TEXTS = [
    "{" + ", ".join(f'"{key}": 1' for key in keys) + "}"
    for n in range(4)
    for keys in itertools.permutations(KEYS, n)
]


def test_of_few_names_each_token_is_allowed_that_leads_to_an_object() -> None:
    """All texts, in all tokenizations."""
    constraint, known = constraint_of(SCHEMAS["few names"]), {""}
    waiting: list[list[int]] = [[]]
    while waiting:
        tokens = waiting.pop()
        text = text_of(tokens)
        wanted = [
            token
            for token, piece in enumerate(PIECES)
            if any(each.startswith(text + piece) for each in TEXTS)
        ]
        assert allowed(constraint.masks(tokens)[0]) == wanted + [END] * (text in TEXTS), text
        for token in wanted:
            if (longer := text + PIECES[token]) not in known:
                known.add(longer)
                waiting.append([*tokens, token])
    assert known >= set(TEXTS)


@pytest.mark.parametrize("name", ["any object", "few names", "many names"])
def test_masks_do_not_depend_on_earlier_questions(name: str) -> None:
    rng, constraint = random.Random(name), constraint_of(SCHEMAS[name])
    for _ in range(8):
        tokens = list[int]()
        for _ in range(12):
            fresh = constraint_of(SCHEMAS[name])
            masks = fresh.masks(tokens)
            draft = [rng.choice([t for t in allowed(masks[0]) if t != END] or [0]), 6, 4]
            n = fresh.n_allowed(tokens, draft)
            assert np.array_equal(constraint.masks(tokens, draft)[0], masks[0])
            assert constraint.n_allowed(tokens, draft) == n
            assert np.array_equal(constraint.masks(tokens)[0], masks[0])
            if END in allowed(masks[0]) and rng.random() < 0.5:
                break
            tokens.append(draft[0])


def test_drafts_are_cut_where_they_repeat_a_key() -> None:
    constraint = constraint_of(OBJECT, n_start=2)
    draft = [
        PIECES.index(piece) for piece in ("{", '"a": 1', ", ", '"b": ', "1", ', "', "a", '": ', "1")
    ]
    tokens = [5, 5, *draft[:1]]
    assert constraint.n_allowed(tokens, draft[1:]) == 6
    masks = constraint.masks(tokens, draft[1:])
    assert [draft[i + 1] in allowed(mask) for i, mask in enumerate(masks[:-1])] == [True] * 6 + [
        False
    ] * 2
    assert not masks[7:].any()
    other = [*draft[1:6], PIECES.index("ab"), *draft[7:]]
    assert constraint.n_allowed(tokens, other) == len(other)
    assert constraint.n_allowed(tokens, draft[1:]) == 6, "the tracker goes back, too"


def test_a_value_may_equal_a_key_and_so_may_a_key_of_another_object() -> None:
    constraint = constraint_of({})
    for text in ('{"a": "a", "b": {"a": ["a", "a"]}, "ab": [{"a": 1}, {"a": 1}]}', '["a", "a"]'):
        tokens = [PIECES.index(char) for char in text]
        assert constraint.n_allowed([], tokens) == len(tokens)
    for text in ('{"a\\b": 1, "a\\b"', '{"b": {"a": 1}, "b"', '{"a": ["}", 1], "a"', '{"": 1, ""'):
        chars = [PIECES.index(char) for char in text]
        assert constraint.n_allowed([], chars) == len(chars) - 1


def test_an_object_that_needs_more_names_than_there_are_says_so() -> None:
    schema = {"patternProperties": {"^a$": {"const": 1}}, "minProperties": 2, **CLOSED, **OBJECT}
    constraint = constraint_of(schema)
    with pytest.raises(ConstraintError, match="cannot continue"):
        constraint.masks([PIECES.index(char) for char in '{"a": 1'])
