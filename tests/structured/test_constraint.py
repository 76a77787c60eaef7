"""Masks allow what can still become a match, in all tokenizations, in any order of calls."""

from __future__ import annotations

import itertools
import random
import re
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ggufspec.errors import DecodeError, OptionError
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable

Extends = Callable[[bytes], bool]  # whether a text can be extended to a match


def table_of(*pieces: bytes | str, special: Sequence[str] = ()) -> TokenTable:
    """These tokens, those `special` ones, and one that ends a text; the longest are usual."""
    known = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    names = [name.encode() for name in (*special, "<end>")]

    def tokenize(before: bytes, text: bytes) -> list[int]:
        tokens = []
        while text:
            longest = max((p for p in known if text.startswith(p)), key=len, default=b"")
            if not longest:
                return tokens
            tokens.append(known.index(longest))
            text = text[len(longest) :]
        return tokens

    n = len(known)
    return TokenTable(
        [*known, *names],
        special=range(n, n + len(names)),
        stop_tokens=[n + len(names) - 1],
        tokenize=tokenize,
    )


def end_of(table: TokenTable) -> int:
    return len(table.pieces) - 1


def allowed(mask: np.ndarray, table: TokenTable) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[len(table.pieces) :].any(), "tokens that there are not"
    return set(np.flatnonzero(bits).tolist())


def of_words(*words: str) -> Extends:
    data = [word.encode() for word in words]
    return lambda text: any(word.startswith(text) for word in data)


def of_pattern(pattern: str, alphabet: str, n_more: int) -> Extends:
    """By trying all extensions of up to `n_more` characters."""
    compiled = re.compile(pattern)
    texts = [
        "".join(letters)
        for n in range(n_more + 1)
        for letters in itertools.product(alphabet, repeat=n)
    ]
    return lambda text: any(compiled.fullmatch(text.decode() + more) for more in texts)


ABC = ("a", "b", "c", "ab", "bc", "ca", "aa", "abc", "aba", "cab", "bb")
LETTERS = ("é", b"\xc3", b"\xa9", b"\xa8", b"\xa9b", "e", "b", "日", b"\xe6\x97", b"\xa5", b"b\xe6")
JSON = (
    "{",
    '{"',
    "a",
    '{"a":',
    '"a',
    '":',
    ": ",
    " ",
    " t",
    "t",
    "true",
    "rue",
    "1",
    "2",
    "12",
    " 1",
    "}",
)
JSON_TEXTS = tuple(f'{{"a": {value}}}' for value in ("true", "1", "12"))

# Name: tokens, grammar, whether a text is the beginning of a match, whether it is a match.
CASES: dict[str, tuple[Sequence[bytes | str], str, Extends, Callable[[bytes], bool]]] = {}


def add_pattern(name: str, source: str, pattern: str, n_more: int) -> None:
    def is_match(text: bytes) -> bool:
        return re.fullmatch(pattern, text.decode()) is not None

    CASES[name] = (ABC, source, of_pattern(pattern, "abc", n_more), is_match)


def add_words(name: str, tokens: Sequence[bytes | str], source: str, *words: str) -> None:
    CASES[name] = (
        tokens,
        source,
        of_words(*words),
        lambda text: text.decode("utf-8", "replace") in words,
    )


for expression, n_more in (("(ab|ba)*c", 2), ("a{2,4}b?", 2), ("[ab]*ca", 2), ("a(b|bc|c)+a", 2)):
    add_pattern(expression, grammar.of_regex(expression), expression, n_more)
add_pattern(
    "gbnf", grammar.of_grammar('root ::= ("a" | "b" | "ab")* x\nx ::= "c" "a"?'), "[ab]*ca?", 1
)
add_pattern(
    "lark",
    grammar.of_grammar('start: word ("c" word)*\nword: /a+b/ | "b"'),
    "(a+b|b)(c(a+b|b))*",
    2,
)
add_words("choices", ABC, grammar.of_choices(["abc", "ab", "cab", "b"]), "abc", "ab", "cab", "b")
add_words("one choice", ABC, grammar.of_choices(["abcab"]), "abcab")
add_words("characters", LETTERS, grammar.of_choices(["é", "èb", "日b", "e"]), "é", "èb", "日b", "e")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [True, 1, 12]}}, "required": ["a"]}
add_words("schema", JSON, grammar.of_json_schema(SCHEMA), *JSON_TEXTS)


@pytest.mark.parametrize("name", CASES)
def test_a_token_may_follow_if_and_only_if_its_bytes_lead_to_a_match(name: str) -> None:
    """All texts of up to four tokens, so all tokenizations of each."""
    tokens, source, extends, is_match = CASES[name]
    table = table_of(*tokens, special=["<tool>"])
    constraint = GrammarConstraint(table, source, 0)
    texts: list[tuple[int, ...]] = [()]
    n_matches = 0
    for _ in range(4):
        longer = []
        for text in texts:
            data = b"".join(table.pieces[token] for token in text)
            expected = {i for i in range(len(tokens)) if extends(data + table.pieces[i])}
            if is_match(data):
                expected.add(end_of(table))
                n_matches += 1
            assert allowed(constraint.masks(text)[0], table) == expected, text
            assert constraint.is_over(text) == (expected == {end_of(table)})
            longer += [(*text, i) for i in expected if i < len(tokens)]
        texts = longer
    assert n_matches


def test_all_tokenizations_of_a_forced_text_are_allowed() -> None:
    """By default, llguidance allows one of them: that would change the distribution."""
    table = table_of("a", "b", "c", "ab", "bc", "abc")
    constraint = GrammarConstraint(table, grammar.of_choices(["abc"]), 0)
    assert allowed(constraint.masks([])[0], table) == {0, 3, 5}
    assert allowed(constraint.masks([0])[0], table) == {1, 4}
    assert allowed(constraint.masks([3])[0], table) == {2}


def bits(constraint: GrammarConstraint, tokens: Sequence[int], draft: Sequence[int]) -> object:
    try:
        return constraint.masks(tokens, draft).tolist()
    except DecodeError:
        return "fails"


QUESTIONS: list[Callable[[GrammarConstraint, Sequence[int], Sequence[int]], object]] = [
    bits,
    lambda constraint, tokens, _: bits(constraint, tokens, ()),
    lambda constraint, tokens, draft: constraint.n_allowed(tokens, draft),
    lambda constraint, tokens, _: list(constraint.forced(tokens)),
    lambda constraint, tokens, _: constraint.is_over(tokens),
]
DEAD_ENDS = 'start: ("a" "x")? ("b" "ab"?)* "c"'  # there is no token with an x


@pytest.mark.parametrize("n_start", [0, 3])
@pytest.mark.parametrize("name", [*CASES, "dead ends"])
def test_the_order_of_questions_does_not_matter(name: str, n_start: int) -> None:
    """The same as by a constraint that was asked nothing before, and shares nothing."""
    tokens, source = CASES[name][:2] if name in CASES else (ABC, DEAD_ENDS)
    table = table_of(*tokens)
    first, rng = GrammarConstraint(table, source, 1), random.Random(name)
    constraint = first.for_another_text(n_start)
    prompt = [1] * n_start
    text: list[int] = []
    guide = GrammarConstraint(table, source, n_start)
    for _ in range(25):
        tokens_so_far, draft = [*prompt, *text], list[int]()
        for _ in range(rng.randrange(5)):
            known = bits(guide, tokens_so_far, draft)
            row = set() if known == "fails" else allowed(np.array(known, np.uint32)[-1], table)
            any_token = rng.randrange(len(table.pieces))
            draft.append(rng.choice(sorted(row)) if row and rng.random() < 0.8 else any_token)
        for ask in rng.sample(QUESTIONS, 2):
            fresh = GrammarConstraint(table, source, n_start)
            assert ask(constraint, tokens_so_far, draft) == ask(fresh, tokens_so_far, draft)
            rng.choice(QUESTIONS)(first, [1, *text], draft)
        text = [*text, *draft[: rng.randrange(len(draft) + 1)]]
        if rng.random() < 0.5:
            text = text[: rng.randrange(len(text) + 1)]


@pytest.mark.parametrize("sequence", [tuple, lambda x: array("i", x)])
def test_texts_and_drafts_are_any_sequences(sequence: Callable[[list[int]], Sequence[int]]) -> None:
    table = table_of(*ABC)
    constraint = GrammarConstraint(table, grammar.of_regex("(ab|ba)*c"), 2)
    masks = constraint.masks(sequence([9, 9, 0]), sequence([1, 2]))
    assert masks.shape == (3, table.n_words)
    assert masks.dtype == np.uint32
    assert masks.flags.c_contiguous
    assert allowed(masks[0], table) == {ABC.index(piece) for piece in ("b", "bc", "bb")}
    assert allowed(masks[2], table) == {end_of(table)}
    assert constraint.n_allowed(sequence([9, 9, 0]), sequence([1, 2])) == 2
    assert list(constraint.forced(sequence([9, 9, 0]))) == [1]
    assert constraint.is_over(sequence([9, 9, 2]))


def test_behind_a_token_that_is_not_allowed_there_is_none() -> None:
    table = table_of(*ABC)
    constraint = GrammarConstraint(table, grammar.of_regex("(ab|ba)*c"), 0)
    masks = constraint.masks([3], [0, 0, 1, 2])
    assert [bool(row.any()) for row in masks] == [True, True, False, False, False]
    assert constraint.n_allowed([3], [0, 0, 1, 2]) == 1
    assert constraint.n_allowed([3], [0, 1, 2]) == 3
    assert constraint.n_allowed([0, 0], [1]) == 0
    assert constraint.forced([0, 0]) == ()
    assert not constraint.is_over([0, 0])
    assert not constraint.masks([0, 0]).any()
    assert constraint.masks([3], [0, 1, 2])[-1].any()  # and nothing of it is kept


def test_any_token_that_ends_texts_may_end_one() -> None:
    pieces = [b"a", b"b", b"<end>", b"<other end>"]
    table = TokenTable(pieces, special=[2, 3], stop_tokens=[3, 2], tokenize=lambda _, text: [])
    constraint = GrammarConstraint(table, grammar.of_regex("ab?"), 0)
    assert allowed(constraint.masks([])[0], table) == {0}
    assert allowed(constraint.masks([0])[0], table) == {1, 2, 3}
    assert allowed(constraint.masks([0, 1])[0], table) == {2, 3}
    assert constraint.n_allowed([], [0, 2]) == 2
    assert not constraint.is_over([0])
    assert constraint.is_over([0, 1])


def test_a_special_token_is_not_its_name() -> None:
    table = table_of("<", "tool", ">", "end", special=["<tool>"])
    constraint = GrammarConstraint(table, grammar.of_regex("<[a-z]+>(<end>)?"), 0)
    assert constraint.n_allowed([], [0, 1, 2, 0, 3, 2]) == 6
    assert allowed(constraint.masks([])[0], table) == {0}
    assert allowed(constraint.masks([0, 1, 2])[0], table) == {0, end_of(table)}


@pytest.mark.parametrize("text", [[0], [3, 0], [0, 3, 1], [0, 3, 3, 1]])
def test_forced_special_tokens_may_follow(text: list[int]) -> None:
    table = table_of("a", "b", "ab", special=["<tool>"])
    names = {3: "<tool>", 0: '"a"', 1: '"b"'}
    source = grammar.of_grammar("start: " + " ".join(names[token] for token in text))
    constraint = GrammarConstraint(table, source, 0)
    for n in range(len(text)):
        assert 3 not in constraint.forced(text[:n])
        assert text[n] in allowed(constraint.masks(text[:n])[0], table)
    assert constraint.is_over(text)
    assert constraint.n_allowed([], text) == len(text)


def forced_text(constraint: GrammarConstraint, table: TokenTable, *text: int) -> bytes:
    return b"".join(table.pieces[token] for token in constraint.forced(text))


def test_forced_text_comes_in_its_usual_tokens() -> None:
    table = table_of(*ABC)
    constraint = GrammarConstraint(table, grammar.of_choices(["abcab", "abcc"]), 0)
    assert list(constraint.forced([])) == [ABC.index("abc")]
    assert list(constraint.forced([0])) == [ABC.index("bc")]
    assert list(constraint.forced([ABC.index("abc")])) == []  # a choice
    assert list(constraint.forced([ABC.index("abc"), 0])) == [1]
    assert list(constraint.forced([ABC.index("abc"), 3])) == []  # over
    assert list(constraint.forced([1])) == []  # not allowed
    assert list(constraint.forced([0])) == [ABC.index("bc")]


def test_forced_text_ends_where_the_text_may_end() -> None:
    table = table_of(*ABC)
    constraint = GrammarConstraint(table, grammar.of_regex("abc(ca)?"), 0)
    assert forced_text(constraint, table) == b"abc"
    assert forced_text(constraint, table, 3) == b"c"
    assert forced_text(constraint, table, 3, 2) == b""
    assert forced_text(constraint, table, 3, 2, 2) == b"a"


def test_a_last_token_that_what_follows_merges_into_a_longer_one_is_left_out() -> None:
    table = table_of('{"a":', " ", " t", " f", "true", "false", " true", " false", "}", "t", "f")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    constraint = GrammarConstraint(table, grammar.of_json_schema(schema), 0)
    assert forced_text(constraint, table) == b'{"a":'
    assert forced_text(constraint, table, 0) == b""
    assert forced_text(constraint, table, 0, 6) == b"}"
    numbers = table_of('{"a":', " ", "1", "2", "12", "}")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2, 12]}}, "required": ["a"]}
    constraint = GrammarConstraint(numbers, grammar.of_json_schema(schema), 0)
    assert forced_text(constraint, numbers) == b'{"a": '


def test_forced_text_has_whole_characters() -> None:
    table = table_of(*LETTERS)
    two = GrammarConstraint(table, grammar.of_choices(["éb", "èb"]), 0)
    assert forced_text(two, table) == b""  # both begin with the same byte
    assert allowed(two.masks([])[0], table) == {0, 1}
    one = GrammarConstraint(table, grammar.of_choices(["éb"]), 0)
    assert forced_text(one, table) == "éb".encode()
    assert one.n_allowed([], [1, 4]) == 2  # the character in two tokens, the second with a letter
    assert one.is_over([1, 4])


def test_forced_tokens_are_allowed_and_leave_no_choice() -> None:
    """No byte of them could be another one, and the text cannot end before them."""
    n_forced = 0
    for name, (tokens, source, extends, is_match) in CASES.items():
        table, rng = table_of(*tokens), random.Random(name)
        constraint = GrammarConstraint(table, source, 0)
        for _ in range(40):
            text: list[int] = []
            for _ in range(rng.randrange(4)):
                row = allowed(constraint.masks(text)[0], table) - {end_of(table)}
                text += [rng.choice(sorted(row))] if row else []
            forced = list(constraint.forced(text))
            assert constraint.n_allowed(text, forced) == len(forced)
            n_forced += len(forced)
            data = b"".join(table.pieces[token] for token in text)
            for byte in b"".join(table.pieces[token] for token in forced):
                others = (data + piece[:1] for piece in table.pieces if piece[0] != byte)
                assert not is_match(data)
                assert not any(is_text(other) and extends(other) for other in others)
                data += bytes([byte])
    assert n_forced > 100


def is_text(data: bytes) -> bool:
    """So that a pattern can be tried: without part of a character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# What fails


def test_a_text_that_needs_bytes_that_no_token_has_fails_and_is_not_complete() -> None:
    table = table_of(*ABC)
    constraint = GrammarConstraint(table, 'start: "a" "x" | "b"', 0)
    for _ in range(2):  # what failed once fails again, and other texts go on
        with pytest.raises(DecodeError, match="cannot continue"):
            constraint.masks([0])
        assert not constraint.is_over([0])
        assert allowed(constraint.masks([])[0], table) == {0, 1}
        assert constraint.is_over([1])
        masks = constraint.masks([], [0, 1])
        assert [bool(row.any()) for row in masks] == [True, False, False]
        assert constraint.forced([0]) in ((), [])
        assert constraint.n_allowed([], [1, end_of(table)]) >= 1


def test_forced_text_that_needs_bytes_that_no_token_has_is_no_error() -> None:
    """Only the text that gets there fails: it may have other tokens."""
    table = table_of("a", "b", "ab", "abx", "c")
    constraint = GrammarConstraint(table, 'start: "a" "b" "x" "c"', 0)
    assert allowed(constraint.masks([])[0], table) == {0, 2, 3}
    for text in ([], [0], [2], []):
        assert constraint.n_allowed(text, constraint.forced(text)) == len(constraint.forced(text))
    assert constraint.n_allowed([], [3, 4]) == 2
    assert constraint.is_over([3, 4])


def test_a_limit_that_a_text_reaches_fails_and_is_not_complete() -> None:
    """The last 2,000 letters decide what may follow: too many states."""
    table = table_of(*ABC)
    rng = random.Random(0)
    text = [rng.randrange(2) for _ in range(1500)]
    constraint = GrammarConstraint(table, grammar.of_regex("(a|b)*a(a|b){2000}c"), 0)
    for _ in range(2):
        with pytest.raises(DecodeError, match=r"cannot continue \(.*too many expressions"):
            constraint.masks(text)
    assert not constraint.is_over(text)
    assert constraint.n_allowed(text, [0]) == 0
    assert constraint.forced(text) == ()
    assert allowed(constraint.masks(text[:50])[0], table) >= {0, 1}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (grammar.of_regex("x"), "no text can match"),
        ("start: start", "no text can match"),
        ('start: "a', "cannot be used"),
        ("start: other", "unknown name"),
        ("start: /a(?=b)/", "look-ahead"),
        ('start: "\ud800"', "cannot be used"),
    ],
)
def test_a_grammar_that_matches_nothing_or_cannot_be_read_is_refused(
    source: str, complaint: str
) -> None:
    with pytest.raises(OptionError, match=complaint):
        GrammarConstraint(table_of(*ABC), source, 0)


@pytest.fixture
def letters() -> TokenTable:
    return table_of(*map(chr, range(32, 127)), "\n", "é", "🙂")


@pytest.mark.parametrize("text", ['say "x"', "a\\b", "a\nb", "é🙂", "<end>", "#no"])
def test_a_choice_is_its_text_whatever_characters_it_has(text: str, letters: TokenTable) -> None:
    constraint = GrammarConstraint(letters, grammar.of_choices([text, "other"]), 0)
    tokens = [letters.pieces.index(character.encode()) for character in text]
    assert constraint.n_allowed([], tokens) == len(tokens)
    assert constraint.is_over(tokens)
    for at in range(len(tokens)):
        wrong = letters.pieces.index(b"~")
        assert constraint.n_allowed(tokens[:at], [wrong]) == 0


@pytest.mark.parametrize("expression", ["a/b", r"a\/b", "[/]", "a\nb", '"'])
def test_a_regular_expression_may_have_any_characters(expression: str, letters: TokenTable) -> None:
    text = expression.strip("[]").replace("\\", "")
    constraint = GrammarConstraint(letters, grammar.of_regex(expression), 0)
    tokens = [letters.pieces.index(character.encode()) for character in text]
    assert constraint.n_allowed([], tokens) == len(tokens)
    assert constraint.is_over(tokens)
    assert constraint.n_allowed([], [letters.pieces.index(b"~")]) == 0
