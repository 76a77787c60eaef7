"""Which tokens may follow: those of a llama.cpp sampler that reads the text from its start."""

from __future__ import annotations

import ctypes
import json
import random
import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import llama_cpp
import pytest
import tiny

from ggufspec import _native
from ggufspec.errors import OptionError
from ggufspec.llama import devices
from ggufspec.llama import grammar as grammar_module
from ggufspec.llama.grammar import Grammar
from ggufspec.llama.log import listening
from ggufspec.llama.model import Model
from ggufspec.llama.vocab import Vocab
from ggufspec.structured import gbnf as notation
from ggufspec.structured.json_schema import gbnf_of_schema

JSON = gbnf_of_schema("true")
GRAMMARS = {
    "json": JSON,
    "sums": 'root ::= term ([-+*/] term)*\nterm ::= [0-9]+ | "(" root ")"',
    "words": 'root ::= (" the" | " model" | " hello" | " world" | " " [^a-m]+ ".")+',
    "anything": "root ::= .*",
    "wide": 'root ::= ([à-ÿ] | "日本" | [🙂-🙏])* "."',
    "ambiguous": 'root ::= "a"* "a"* ("ab" | "a" "b"?)',
}
EOG = -1  # stands for the vocabulary's own in the tests below


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vocab]]:
    folder = tmp_path_factory.mktemp("models")
    words = (*tiny.WORDS, '{"', '":', '", "', "ab", "12", "}]")
    models = {
        "spm": Model(tiny.write_llama(folder / "spm.gguf", vocab=tiny.spm_vocab(words=words))),
        "bpe": Model(tiny.write_llama(folder / "bpe.gguf", vocab=tiny.bpe_vocab(words=words))),
        "demo": Model(Path(str(files("ggufspec.standin") / "classics-draft.gguf"))),
    }
    yield {name: model.vocab for name, model in models.items()}
    for model in models.values():
        model.close()


@pytest.fixture(scope="module")
def spm(vocabs: dict[str, Vocab]) -> Vocab:
    return vocabs["spm"]


@pytest.fixture(autouse=True)
def silence(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing that a grammar does may end up on the user's terminal."""
    yield
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def every(vocab: Vocab) -> array[int]:
    return array("i", range(vocab.n_tokens))


def reference(vocab: Vocab, gbnf: str, text: Sequence[int]) -> list[bool] | None:
    """The same by llama.cpp alone, from the start; None as soon as a token may not follow."""
    sampler = llama_cpp.llama_sampler_init_grammar(vocab.pointer, gbnf.encode(), b"root")
    try:
        for token in text:
            if not applied(sampler, [token])[0] or token in vocab.stop_tokens:
                return None
            llama_cpp.llama_sampler_accept(sampler, token)
        return applied(sampler, every(vocab))
    finally:
        llama_cpp.llama_sampler_free(sampler)


def applied(sampler: object, tokens: Sequence[int]) -> list[bool]:
    data = (llama_cpp.llama_token_data * len(tokens))()
    for entry, token in zip(data, tokens, strict=True):
        entry.id = token
    whole = llama_cpp.llama_token_data_array(data, len(tokens), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(whole))
    return [entry.logit == 0 for entry in data]


def following(grammar: Grammar, vocab: Vocab, text: Sequence[int]) -> list[int]:
    """What may follow, without what ends the text."""
    answers = grammar.allowed(text, every(vocab)) or []
    return [t for t, may in enumerate(answers) if may and t not in vocab.stop_tokens]


def may_end(grammar: Grammar, vocab: Vocab, text: Sequence[int]) -> bool:
    answers = grammar.allowed(text, sorted(vocab.stop_tokens))
    assert answers is None or len(set(answers)) == 1
    return bool(answers and answers[0])


def spell(vocab: Vocab, text: str) -> list[int]:
    """Tokens for the bytes of a text, longest first."""
    pieces: dict[bytes, int] = {}
    for token in range(vocab.n_tokens):
        pieces.setdefault(vocab.piece(token), token)
    data, tokens = text.encode(), []
    while data:
        size = next(n for n in range(min(len(data), 12), 0, -1) if data[:n] in pieces)
        tokens.append(pieces[data[:size]])
        data = data[size:]
    return tokens


# The text decides, not the way there


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("kind", ["spm", "bpe", "demo"])
def test_what_may_follow_is_what_a_fresh_sampler_says(
    vocabs: dict[str, Vocab], kind: str, name: str
) -> None:
    vocab, rng = vocabs[kind], random.Random(f"{kind} {name}")
    grammar, text = Grammar(vocab, GRAMMARS[name]), []
    for _ in range(12 if kind == "demo" else 40):
        expected = reference(vocab, GRAMMARS[name], text)
        assert grammar.allowed(text, every(vocab)) == expected
        nexts = [token for token, may in enumerate(expected or []) if may]
        if not nexts or rng.random() < 0.2:
            text = text[: rng.randrange(len(text) + 1)]  # another branch
        elif rng.random() < 0.1:
            text.append(rng.randrange(vocab.n_tokens))
        else:
            text.append(rng.choice(nexts))


def test_a_draft_is_asked_from_its_start_twice(spm: Vocab) -> None:
    grammar, rng, text = Grammar(spm, JSON), random.Random(1), list[int]()
    for _ in range(15):
        draft = list(text)
        for _ in range(4):
            draft.append(rng.choice(following(grammar, spm, draft) or [5]))
        for n in range(len(text), len(draft) + 1):
            assert grammar.allowed(draft[:n], every(spm)) == reference(spm, JSON, draft[:n])
        text = draft[: len(text) + rng.randrange(1, 4)]
        if grammar.allowed(text, [5]) is None:
            text = []


def test_what_is_known_of_a_longer_text_is_not_read_again(spm: Vocab) -> None:
    accepted: list[int] = []
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
    addresses = devices.addresses(*grammar_module.FUNCTIONS)
    theirs = prototype(addresses["llama_sampler_accept"])

    @prototype
    def accept(sampler: int, token: int) -> None:
        accepted.append(token)
        theirs(sampler, token)

    addresses["llama_sampler_accept"] = ctypes.cast(accept, ctypes.c_void_p).value or 0
    start = llama_cpp.llama_sampler_init_grammar(spm.pointer, JSON.encode(), b"root")
    start_at = ctypes.cast(start, ctypes.c_void_p).value
    native = _native.Grammar(start_at, spm.pointer, spm.n_tokens, **addresses)
    text = array("i", spell(spm, "[1, 2, 3, 4, 5, 6]"))
    other = array("i", spell(spm, "[1, 2, 3,,"))
    for n in (*range(len(text) + 1), 3, *range(2, len(text) + 1)):
        assert native.allowed(text[:n], text[:1]) is not None
    assert accepted == list(text)
    assert native.allowed(other, text[:1]) is None
    assert native.allowed(text, text[:1]) is not None
    assert accepted == [*text, *text[len(other) - 1 :]]


def test_going_back_further_than_states_are_kept(spm: Vocab) -> None:
    grammar = Grammar(spm, JSON)
    text = spell(spm, "[" + "1, " * 150 + "[")
    for n in (len(text), 5, len(text) - 3, 200, 0, 300, 140, 12, 11, len(text)):
        assert grammar.allowed(text[:n], every(spm)) == reference(spm, JSON, text[:n])


def test_the_prompt_is_not_under_the_grammar(spm: Vocab) -> None:
    grammar, rng = Grammar(spm, JSON), random.Random(2)
    for _ in range(30):
        prompt = [rng.randrange(spm.n_tokens) for _ in range(rng.randrange(9))]
        text = spell(spm, rng.choice(['{"a": [1', "[true, ", "12", "x", "", '"ab']))
        grammar.begin(len(prompt))
        assert grammar.allowed([*prompt, *text], every(spm)) == reference(spm, JSON, text)


def test_two_grammars_are_independent(spm: Vocab) -> None:
    one, other = Grammar(spm, 'root ::= "ab"'), Grammar(spm, 'root ::= "ba"')
    a, b = spell(spm, "a"), spell(spm, "b")
    assert one.allowed(a, b) == [True]
    assert other.allowed(a, b) is None
    assert other.allowed(b, a) == [True]
    assert one.allowed(a, b) == [True]


# Where texts leave and end


def test_a_text_that_has_left_is_followed_by_nothing_until_it_is_another(spm: Vocab) -> None:
    grammar = Grammar(spm, JSON)
    good, bad = spell(spm, '{"hello": '), spell(spm, "}")
    for text in (good + bad, good + bad + good, bad, good + bad):
        assert grammar.allowed(text, every(spm)) is None
    assert grammar.allowed(good, every(spm)) == reference(spm, JSON, good)


def test_the_end_is_allowed_only_where_the_grammar_may_end(spm: Vocab) -> None:
    grammar = Grammar(spm, JSON)
    for text, ends in (("[1", False), ("[1]", True), ("12", True), ("", False), ('"', False)):
        assert may_end(grammar, spm, spell(spm, text)) == ends


def test_behind_the_end_comes_nothing_and_an_early_end_has_left(spm: Vocab) -> None:
    grammar = Grammar(spm, JSON)
    for text in ("12", "[1"):
        ended = [*spell(spm, text), spm.eos]
        assert grammar.allowed(ended, every(spm)) is None
        assert grammar.allowed([*ended, spm.eos], every(spm)) is None
        assert grammar.allowed([*ended, *spell(spm, "3")], every(spm)) is None
    assert following(grammar, spm, spell(spm, "12"))


def test_characters_are_split_over_tokens(spm: Vocab) -> None:
    grammar = Grammar(spm, 'root ::= "é" | "日本"')
    tokens = spell(spm, "日本")
    assert len(tokens) == 6
    for n in range(6):
        assert following(grammar, spm, tokens[:n])[-1] == (tokens[n] if n else spell(spm, "日")[0])
        assert not may_end(grammar, spm, tokens[:n])
    assert may_end(grammar, spm, tokens)
    assert grammar.allowed([tokens[0], *spell(spm, "a")], every(spm)) is None


def test_a_grammar_may_name_tokens(vocabs: dict[str, Vocab]) -> None:
    vocab = vocabs["bpe"]
    start = vocab.tokenize("<|im_start|>", add_special=False, parse_special=True)
    grammar = Grammar(vocab, 'root ::= <|im_start|> "a" !<|im_start|>')
    assert following(grammar, vocab, []) == start
    assert start[0] not in following(grammar, vocab, [*start, *spell(vocab, "a")])
    assert Grammar(vocab, f"root ::= <[{start[0]}]>").allowed([], start) == [True]


def test_what_llama_cpp_allows_and_then_refuses_has_left(spm: Vocab) -> None:
    (token,) = spell(spm, "ab")
    grammar = Grammar(spm, f'root ::= "a" <[{token}]>')
    assert grammar.allowed([], [token]) == [True]  # llama.cpp looks at the id within a token
    assert grammar.allowed([token], [token]) is None


@pytest.mark.parametrize("token", [-1, 1 << 20, 1 << 40])
def test_tokens_outside_the_vocabulary_are_refused(spm: Vocab, token: int) -> None:
    grammar = Grammar(spm, JSON)
    for tokens, candidates in (([token], [5]), ([], [token])):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            grammar.allowed(tokens, candidates)
    grammar.begin(2)
    with pytest.raises(ValueError, match="before its start"):
        grammar.allowed([5], [5])


def test_memory_does_not_grow_with_texts(spm: Vocab) -> None:
    resource = pytest.importorskip("resource")
    grammar, tokens = Grammar(spm, JSON), spell(spm, "[" + "1, " * 60)

    def write_texts(n_texts: int) -> int:
        for i in range(n_texts):
            for n in range(i % 7, len(tokens), 9):
                grammar.allowed(tokens[:n], tokens[:3])
            grammar.allowed(tokens[5:6], tokens[:3])
        most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most // 1024 if sys.platform == "darwin" else most  # KB

    before = write_texts(30)
    assert write_texts(90) - before < 2000  # a leaked state is about 10 KB, 16,000 are made


# Grammars that cannot be used

DEEP = "(" * 100_000
BAD = {
    "": "empty",
    " # only a comment\n": "empty",
    'a ::= "x"': "no rule 'root'",
    'root ::= "x"\n  | other': "line 2, column 3",
    "root ::= other": "no rule 'other'",
    'root = "x"': "needs ::=",
    'root ::= "x': "line 1, column 10",
    r'root ::= "\q"': "escapes",
    "root ::= [a": "escapes",
    "root ::= [z-a]": "swap",
    'root ::= ("x"': "never closed",
    'root ::= "x")': "end of the line",
    "root ::= *": "nothing before it",
    'root ::= ""*': "nothing before it",
    'root ::= "x"\nroot ::= "y"': "twice",
    'root ::= "x"**': "may be empty",
    "root ::= <no-such-token>": "no token",
    "root ::= <[99999]>": "no token",
    "root ::= <[99999999999999999999999]>": "no token",
    'root ::= "x"{1,100000}': "at most 2,000",
    'root ::= "x"{99999999999999999999999}': "at most 2,000",
    'root ::= "x"{5,2}': "swap",
    'root ::= ("x"{0,100}){100}': "repetitions of repetitions",
    f'root ::= {" ".join(["x{2000}"] * 99)}\nx ::= "x"': "too large",
    f'root ::= "{"x" * 1000}"{{2000}}': "too large",
    'root ::= root "x" | "y"': "left recursion",
    'root ::= "y" | root': "left recursion",
    'root ::= a "x" | "z"\na ::= b root\nb ::= c\nc ::= "y" | ': "left recursion",
    'root ::= ("y"?) root "x" | "z"': "left recursion",
    'root ::= "x" root': "ever ends",
    'root ::= "\0"': "NUL",
    'root ::= "\ud800"': "Unicode",
    f"root ::= {DEEP}": "brackets",
    f'root ::= {DEEP}"x"{")" * 100_000}': "brackets",
    f'root ::= "{"x" * 300_000}"': "too long",
    "\n".join(
        [
            "root ::= r0",
            *(f'r{i} ::= r{i + 1} "a" | r{i + 1} "b"' for i in range(40)),
            'r40 ::= "x"',
        ]
    ): "too many ways",
    "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(9000)), 'r9000 ::= "x"']): (
        "too many ways"
    ),
}


@pytest.mark.parametrize(("gbnf", "complaint"), BAD.items(), ids=[repr(bad[:30]) for bad in BAD])
def test_a_bad_grammar_is_refused_and_named(spm: Vocab, gbnf: str, complaint: str) -> None:
    with pytest.raises(OptionError, match=re.escape(complaint)):
        Grammar(spm, gbnf)


def test_large_grammars_within_the_bounds_are_taken(spm: Vocab) -> None:
    deep = notation.N_NESTED
    for gbnf in (
        f'root ::= {"(" * deep}"x"{")" * deep}',
        'root ::= ("x" "y"?){0,900}',
        'root ::= "x"{2000} "y"?',
        "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(1500)), 'r1500 ::= "x"']),
        'root ::= ws* "x"\nws ::= [ ]*',
    ):
        assert following(Grammar(spm, gbnf), spm, [])


def test_whatever_passes_the_check_llama_cpp_can_parse(spm: Vocab) -> None:
    rng, n_taken = random.Random(3), 0
    sources = [
        *GRAMMARS.values(),
        'root ::= <[5]> (a | "b"?){2,3} # x\na ::= [^a-c\\]\\x41-] . "\\n"+',
    ]
    for _ in range(1500):
        chars = list(rng.choice(sources))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(chars))
            chars[at : at + rng.randrange(2)] = rng.choice('()[]{}"|*+?.-^\\ \n#<>!,05aé:=r')
        try:
            notation.check("".join(chars), lambda name: name == "<[5]>")
        except OptionError:
            continue
        n_taken += 1  # whatever llama.cpp printed of it, the fixture sees
        with listening():
            sampler = llama_cpp.llama_sampler_init_grammar(
                spm.pointer, "".join(chars).encode(), b"root"
            )
        llama_cpp.llama_sampler_free(sampler)
    assert n_taken > 100


# JSON schemas

TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": -12, "maximum": 345},
                "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
            },
            "required": ["n"],
        }
    },
}
SCHEMAS: list[dict[str, object]] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {}, "b": {"const": 1}, "c": {"type": "null"}}},
    {
        "type": "object",
        "title": "a person",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0},
            "score": {"type": "number", "minimum": -1, "maximum": 2},
            "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 3},
            "home": {"type": "object", "properties": {"x": {"type": "boolean"}}},
        },
        "required": ["age", "home"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"ab": {"type": "null"}, "ac": {"type": "boolean"}},
        "required": ["ac", "ad"],
        "additionalProperties": {"type": "integer"},
    },
    {
        "enum": [
            'say "x"',
            "back\\slash",
            "two\nlines",
            "é日🙂^]-",
            1.5,
            None,
            True,
            {"a": [1]},
            "\ud800",
        ]
    },
    {"const": 'a"b'},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "null"}],
        "items": {"const": 1},
        "minItems": 3,
    },
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"},
    {"type": "string", "pattern": r"^(?:[A-Z]{2}|x\.[^a-y\d-]+)-\d{1,3}[ -~]?$"},
    {"type": "string", "pattern": "b"},
    {"oneOf": [{"type": "integer", "maximum": -1000}, {"allOf": [{"type": "boolean"}]}]},
    {"type": "integer", "exclusiveMinimum": 95, "exclusiveMaximum": 1003},
    TREE,
]


def fits(value: object, schema: object, whole: Mapping[str, object]) -> bool:
    """JSON Schema by hand, for what the schemas above say."""
    if not isinstance(schema, dict):
        return schema is True
    if "$ref" in schema:
        return fits(value, whole["$defs"][schema["$ref"].split("/")[-1]], whole)  # type: ignore
    for some in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if some and not any(fits(value, part, whole) for part in some):
            return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    kinds = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    kind = {True: "boolean", False: "boolean", None: "null"}.get(
        value if value is None or isinstance(value, bool) else 2,
        kinds.get(type(value)),  # type: ignore
    )
    types = schema.get("type", kind)
    if kind not in types and not (kind == "integer" and types == "number"):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        return set(schema.get("required", [])) <= set(value) and all(
            fits(part, known.get(key, other), whole) for key, part in value.items()
        )
    if isinstance(value, list):
        prefix = schema.get("prefixItems", [])
        parts = [*prefix, *[schema.get("items", True)] * (len(value) - len(prefix))]
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 999) and all(
            map(fits, value, parts, [whole] * len(value))
        )
    if isinstance(value, str):
        if schema.get("format") == "date-time":
            datetime.fromisoformat(re.sub(r"\.\d+|Z$", "", value))
        shape = {"uuid": r"[\da-fA-F-]{36}", "email": r"[^@]+@[^@]+\.[^@]+"}
        shaped = re.fullmatch(shape.get(schema.get("format", ""), "(?s:.*)"), value)
        long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 9999)
        return bool(shaped and re.search(schema.get("pattern", ""), value) and long_enough)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return low <= value <= high and (above is None or above < value < below)
    return True


CLOSING = (b'"', b"b", b"-", b"}", b"]", b"1")  # the first of them that may follow

# llama.cpp takes characters in more bytes than they need for characters, and so does every grammar.
OVERLONG = (b"\xe0", b"\xf0")


def walk(grammar: Grammar, vocab: Vocab, rng: random.Random, n_free: int) -> str:
    """A random text: free at first, then whatever closes most."""
    tokens: list[int] = []
    while True:
        nexts = [t for t in following(grammar, vocab, tokens) if vocab.piece(t) not in OVERLONG]
        if may_end(grammar, vocab, tokens) and (not nexts or rng.random() < len(tokens) / n_free):
            return b"".join(map(vocab.piece, tokens)).decode("utf-8")
        if len(tokens) > n_free:
            by_piece = {vocab.piece(token): token for token in nexts}
            closing = [by_piece[piece] for piece in CLOSING if piece in by_piece][:1]
            nexts = closing or nexts
        assert nexts, b"".join(map(vocab.piece, tokens))
        assert len(tokens) < 300, b"".join(map(vocab.piece, tokens))
        tokens.append(rng.choice(nexts))


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(s)[:40] for s in SCHEMAS])
def test_every_text_under_a_schema_is_json_that_fits_it(
    spm: Vocab, schema: dict[str, object]
) -> None:
    grammar, rng = Grammar(spm, gbnf_of_schema(json.dumps(schema))), random.Random(4)
    assert gbnf_of_schema(schema) == gbnf_of_schema(json.dumps(schema))
    texts = {walk(grammar, spm, rng, n_free=30) for _ in range(12)}
    for text in texts:
        assert fits(json.loads(text), schema, schema), text
    assert len(texts) > 1 or "const" in schema


def accepts(vocab: Vocab, schema: object, text: str) -> bool:
    return may_end(Grammar(vocab, gbnf_of_schema(json.dumps(schema))), vocab, spell(vocab, text))


@pytest.mark.parametrize("text", ['{"a": [1, -2.5e3, "é\\n"]}', "[]", "null", '"\\u00e9"', "0"])
def test_a_schema_that_says_nothing_accepts_any_json(spm: Vocab, text: str) -> None:
    assert accepts(spm, True, text)
    assert accepts(spm, {"description": "anything"}, text)


def test_integers_have_both_bounds_exactly(spm: Vocab) -> None:
    for low, high in ((0, 0), (7, 132), (-45, 12), (-130, -99), (95, 1003), (137, 245)):
        grammar = Grammar(spm, gbnf_of_schema({"type": "integer", "minimum": low, "maximum": high}))
        near = range(low - 12, high + 13)
        assert [n for n in near if may_end(grammar, spm, spell(spm, str(n)))] == list(
            range(low, high + 1)
        )


def test_other_properties_are_none_of_those_that_are_named(spm: Vocab) -> None:
    schema = {"properties": {"ab": {"type": "null"}, "a": {}}, "additionalProperties": {"const": 1}}
    for name, fine in (("ab", False), ("a", True), ("", True), ("abc", True), ("b", True)):
        assert accepts(spm, schema, json.dumps({name: 1})) == fine


@pytest.mark.parametrize(
    ("schema", "fine", "wrong"),
    [
        ({"items": {}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        ({"items": {}, "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"items": {}, "maxItems": 0}, ["[]"], ["[1]"]),
        ({"prefixItems": [{}, {}], "maxItems": 3, "items": {}}, ["[1,2]", "[1,2,3]"],
         ["[1,2,3,4]"]),
        ({"minLength": 1, "maxLength": 2}, ['"a"', '"\\u00e9b"'], ['""', '"abc"']),
        ({"pattern": "^[ -~]$"}, ['"a"', '" "'], ['"""', '"\\"', '"\x7f"', '"ab"']),
        ({"pattern": "^[^a]+$"}, ['"b\u00e9"'], ['"ba"', '"b""', '"\n"', '""']),
        ({"pattern": "^(a|b.)c?$"}, ['"a"', '"bxc"'], ['"b"', '"axc"']),
        ({"pattern": "a|b"}, ['"xbx"', '"a"'], ['"x"']),
        ({"properties": {"a": {}, "b": {}}, "required": ["b"]}, ['{"b":1}', '{"a":1,"b":1}'],
         ["{}", '{"a":1}', '{"a":1,}', '{,"b":1}', '{"b":1,"c":1}']),
        ({"type": "number", "minimum": -2, "maximum": 1}, ["-2", "-1.5", "0.25", "1"],
         ["-2.5", "1.5", "1e5"]),
        ({"type": "string"}, ['"\U0001f642"'], ['"\n"', '"\\ud83d"', '"\\x"', "a"]),
    ],
)  # fmt: skip
def test_a_schema_accepts_and_refuses(
    spm: Vocab, schema: object, fine: list[str], wrong: list[str]
) -> None:
    assert [accepts(spm, schema, text) for text in fine] == [True] * len(fine)
    assert [accepts(spm, schema, text) for text in wrong] == [False] * len(wrong)


def test_a_long_text_needs_no_deep_brackets(spm: Vocab) -> None:
    schema = {"type": "string", "maxLength": 2000}
    assert accepts(spm, schema, json.dumps("hello" * 400))
    assert not accepts(spm, schema, json.dumps("hello" * 400 + "!"))
