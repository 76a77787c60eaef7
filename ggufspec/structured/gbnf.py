"""Parses GBNF, and refuses grammars that llama.cpp cannot handle.

llama.cpp prints its parse errors past the log, and its parser and stacks have few bounds: deep
brackets overflow the C stack, `{5,2}` repeats 2^64 times, left recursion after a rule that may be
empty never ends, `{0,5000}` silently means no limit. Errors here name line and column.
Syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ggufspec.errors import OptionError

ROOT = "root"
N_BYTES = 1 << 18  # of the grammar, which llama.cpp copies with every state
N_ELEMENTS = 1 << 16  # characters, ranges and names with repetitions expanded: copied as well
N_NESTED = 500  # brackets: half a megabyte of C stack
N_REPEATED = 2000  # llama.cpp treats a larger maximum as none
N_WAYS = 100_000  # to begin a rule; llama.cpp has a stack for each
N_DEEP = 2000  # length of a chain of rules that begin with one another

_ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])'
_CHAR = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_LITERAL = re.compile(rf'"(?:[^"\\]|{_ESCAPE})*"')
_CLASS = re.compile(rf"\[(\^?)((?:[^\]\\]|{_ESCAPE})*)\]")
_TOKEN = re.compile(r"!?(<\[([0-9]+)\]>|<(?!\[)[^>]*>)")
_NAME = re.compile(r"[A-Za-z0-9-]+")
_REPEAT = re.compile(r"[*+?]")
_INLINE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_NUMBER = re.compile(r"[0-9]+")

_TERMINAL = None  # instead of a rule: an item that reads a character

# The items of an alternative: rules, and how often each.
_Sequence = list[tuple["str | None", int]]


@dataclass
class _Rule:
    alternatives: list[_Sequence] = field(default_factory=lambda: [[]])


@dataclass
class _Level:
    """An open bracket, or the rule itself, with the last item of its sequence."""

    name: str
    rule: _Rule
    opened_at: int
    n_symbols: int  # before it was opened
    item: _Sequence = field(default_factory=list)  # the last of the sequence, which `*` repeats
    n_elements: int = 0  # of the item
    n_rules: int = 1  # that llama.cpp makes of the item

    def finish_item(self) -> None:
        self.rule.alternatives[-1] += self.item
        self.item, self.n_elements, self.n_rules = [], 0, 1


def check(gbnf: str, is_token: Callable[[str], bool]) -> None:
    """Raise OptionError, with line and column, unless llama.cpp can use `gbnf` safely.

    `is_token`: whether a `<name>` or `<[id]>` is one token of the vocabulary.
    """
    try:
        data = gbnf.encode("utf-8")
    except UnicodeEncodeError as error:
        raise OptionError(
            f"the grammar is not valid Unicode at character {error.start}: {error.reason}"
        ) from error
    if len(data) > N_BYTES:
        raise OptionError(
            f"the grammar is too long: {len(data):,} bytes, at most {N_BYTES:,} can be used"
        )
    if "\0" in gbnf:
        raise OptionError(f"the grammar has a NUL character at {gbnf.index(chr(0))}; leave it out")
    _check_rules(_Reader(gbnf, is_token).read())


class _Reader:
    """Parses a grammar in one pass, with an explicit stack for the brackets."""

    def __init__(self, gbnf: str, is_token: Callable[[str], bool]) -> None:
        self._text = gbnf
        self._is_token = is_token
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._asked: dict[str, int] = {}  # names of rules, and where each is first used
        self._n_generated = 0
        self._n_elements = 0

    def read(self) -> dict[str, _Rule]:
        self._skip(_SPACE)
        if self._at == len(self._text):
            raise OptionError(f"the grammar is empty; it needs a rule: {ROOT} ::= ...")
        while self._at < len(self._text):
            self._read_rule()
        for name, at in self._asked.items():
            if name not in self._rules:
                raise self._wrong(f"there is no rule {name!r}; write it: {name} ::= ...", at)
        if ROOT not in self._rules:
            raise OptionError(
                f"the grammar has no rule {ROOT!r}, which matches the whole text; its rules are "
                f"{', '.join([name for name in self._rules if '_' not in name][:10])}"
            )
        return self._rules

    def _read_rule(self) -> None:
        start = self._at
        name = self._take(_NAME, "the name of a rule (letters, digits, -)").group()
        self._skip(_INLINE)
        if not self._text.startswith("::=", self._at):
            raise self._wrong(f"needs ::= after the name of the rule {name!r}")
        if name in self._rules:
            raise self._wrong(f"the rule {name!r} is defined twice; define it once, with |", start)
        self._at += 3
        self._skip(_SPACE)
        rule = self._rules[name] = _Rule()
        self._asked.setdefault(name, start)
        self._read_sequences(name, _Level(name, rule, start, self._n_symbols))
        if self._at < len(self._text):
            self._take(_NEWLINE, "the end of the line, or one of | ( ) * + ? { after an item")
            self._skip(_SPACE)

    def _read_sequences(self, name: str, outermost: _Level) -> None:
        levels = [outermost]
        while self._at < len(self._text):
            level, char = levels[-1], self._text[self._at]
            if char == "(":
                if len(levels) > N_NESTED:
                    raise self._wrong(f"more than {N_NESTED} nested brackets")
                level.finish_item()
                n_symbols, sub_name = self._n_symbols, self._generate(name)
                sub_rule = self._rules[sub_name] = _Rule()
                levels.append(_Level(sub_name, sub_rule, self._at, n_symbols))
                self._at += 1
            elif char == ")" and len(levels) > 1:
                level.finish_item()
                levels.pop()
                self._at += 1
                self._set_item(levels[-1], [(level.name, 1)], 1)
                levels[-1].n_rules = max(1, self._n_symbols - level.n_symbols)
            elif char == "|":
                level.finish_item()
                level.rule.alternatives.append([])
                self._at += 1
                self._skip(_SPACE)
                continue
            elif char in "*+?{":
                self._repeat(name, level, nested=len(levels) > 1)
            elif not self._read_item(level):
                break
            # The bracket that was just opened or closed may have changed the level.
            self._skip(_SPACE if len(levels) > 1 or char == "(" else _INLINE)
        levels[-1].finish_item()
        if len(levels) > 1:
            raise self._wrong("a bracket is never closed", levels[-1].opened_at)

    def _check_escapes(self, text: str, at: int) -> None:
        """Refuse escapes of NUL and of surrogates, which no text has."""
        for escape in _CHAR.findall(text):
            if len(escape) > 2:
                code = int(escape[2:], 16)
                if code == 0 or 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
                    raise self._wrong(f"{escape} is a character that no text can have", at)

    def _read_item(self, level: _Level) -> bool:
        """Read a literal, a class, a token or the name of a rule; False if there is none."""
        char, at = self._text[self._at], self._at
        if char == '"':
            found = self._take(_LITERAL, 'a text that ends with " and has only GBNF escapes')
            self._check_escapes(found.group(), at)
            n_elements = len(_CHAR.findall(found.group()[1:-1]))
        elif char == "[":
            found = self._take(_CLASS, "a class that ends with ] and has only GBNF escapes")
            self._check_escapes(found.group(), at)
            n_elements = self._check_ranges(found.group(2), at)
        elif char in "<!":
            found = self._take(_TOKEN, "a token: <text> or <[id]>")
            if not self._is_token(found.group(1)):
                raise self._wrong(f"{found.group(1)} is no token of the model's vocabulary", at)
            n_elements = 1
        elif char == ".":
            self._at += 1
            n_elements = 1
        else:
            named = _NAME.match(self._text, self._at)
            if not named:
                return False
            self._at = named.end()
            self._asked.setdefault(named.group(), at)
            self._set_item(level, [(named.group(), 1)], 1)
            return True
        self._set_item(level, [(_TERMINAL, 1)] if n_elements else [], n_elements)
        return True

    def _check_ranges(self, characters: str, at: int) -> int:
        """The number of elements that llama.cpp makes of the characters of a class."""
        chars = _CHAR.findall(characters)
        i = 0
        while i < len(chars):
            if i + 2 < len(chars) and chars[i + 1] == "-":
                if _code_point(chars[i]) > _code_point(chars[i + 2]):
                    raise self._wrong(
                        f"the range {chars[i]}-{chars[i + 2]} is empty; swap its ends", at
                    )
                i += 3
            else:
                i += 1
        return len(chars)

    def _repeat(self, name: str, level: _Level, *, nested: bool) -> None:
        at = self._at
        least, most = self._read_times(nested)
        if not level.n_elements:
            raise self._wrong("there is nothing before it to repeat", at)
        for times in (least, most or 0):
            if times > N_REPEATED:
                raise self._wrong(f"{times:,} repetitions; at most {N_REPEATED:,} can be used", at)
        if most is not None and most < least:
            raise self._wrong(f"at least {least} and at most {most} repetitions; swap them", at)
        total = most or least or 1
        if level.n_rules * total > N_REPEATED:
            raise self._wrong(
                f"repetitions of repetitions: {level.n_rules * total:,} rules; at most "
                f"{N_REPEATED:,} can be used. Repeat less, or a simpler item",
                at,
            )
        item, n_elements = level.item, level.n_elements
        level.n_rules *= total
        n_optional = 1 if most is None else most - least
        self._count(n_elements * max(0, least - 1) + n_optional * (n_elements + 3))
        repeated = [(rule, times * least) for rule, times in item] if least else []
        if n_optional:
            again = _Rule([list(item), []])
            rest = self._generate(name, n_optional)
            self._rules[rest] = again
            if most is None or n_optional > 1:
                again.alternatives[0].append((rest, 1))
            repeated.append((rest, 1))
        level.item = repeated
        level.n_elements = n_elements * least + (1 if n_optional else 0)

    def _read_times(self, nested: bool) -> tuple[int, int | None]:
        space = _SPACE if nested else _INLINE
        simple = _REPEAT.match(self._text, self._at)
        if simple:
            self._at = simple.end()
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[simple.group()]
        self._at += 1
        self._skip(space)
        least = self._take_number("a number of repetitions")
        self._skip(space)
        most: int | None = least
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(space)
            most = None
            if _NUMBER.match(self._text, self._at):
                most = self._take_number("a number of repetitions")
                self._skip(space)
        if not self._text.startswith("}", self._at):
            raise self._wrong("needs , or } after a number of repetitions")
        self._at += 1
        return least, most

    def _take_number(self, needed: str) -> int:
        at = self._at
        digits = self._take(_NUMBER, needed).group().lstrip("0")
        if len(digits) > 9:
            raise self._wrong(f"too many repetitions; at most {N_REPEATED:,} can be used", at)
        return int(digits or 0)

    def _set_item(self, level: _Level, item: _Sequence, n_elements: int) -> None:
        level.finish_item()
        level.item, level.n_elements = item, n_elements
        self._count(n_elements)

    def _count(self, n_elements: int) -> None:
        self._n_elements += n_elements
        if self._n_elements > N_ELEMENTS:
            raise self._wrong(
                f"the grammar is too large: more than {N_ELEMENTS:,} characters and names with its "
                "repetitions expanded; repeat less, or shorter items"
            )

    @property
    def _n_symbols(self) -> int:
        return len(self._asked) + self._n_generated

    def _generate(self, name: str, n_rules: int = 1) -> str:
        self._n_generated += n_rules
        return f"{name}_{self._n_generated}"

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        assert found
        self._at = found.end()

    def _take(self, pattern: re.Pattern[str], needed: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if not found:
            raise self._wrong(f"needs {needed}")
        self._at = found.end()
        return found

    def _wrong(self, what: str, at: int | None = None) -> OptionError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        found = repr(self._text[at : at + 20]) if at < len(self._text) else "its end"
        return OptionError(f"the grammar, line {line}, column {column}, at {found}: {what}")


# Rules that begin with rules


def _check_rules(rules: dict[str, _Rule]) -> None:
    """Refuse left recursion, and what llama.cpp's stacks cannot hold (N_WAYS, N_DEEP)."""
    if ROOT not in _rules_that_can_be(rules, of_characters=True):
        raise OptionError(
            "no text of the grammar ever ends, because its rules need each other; give one of them "
            "an alternative, or make a repeated item optional"
        )
    empty = _rules_that_can_be(rules, of_characters=False)
    ways: dict[str, int] = {}
    depths: dict[str, int] = {}
    for group in _components(rules, empty):
        together = set(group)
        for name in group:
            ways[name], depths[name] = 1, 1
            for begins, times, grows in _beginnings(rules[name], empty):
                if begins not in together:
                    ways[name] += times * ways[begins]
                    depths[name] = max(depths[name], 1 + depths[begins])
                elif grows or _written(name) == name:
                    raise OptionError(
                        f"the grammar's rule {_written(name)!r} can begin with itself (left "
                        "recursion), so it never reaches a character; put the repeated part last: "
                        "not  a ::= a x | y  but  a ::= y x*"
                    )
            if ways[name] > N_WAYS or depths[name] > N_DEEP:
                raise OptionError(
                    f"the grammar's rule {_written(name)!r} can begin in too many ways; write "
                    "fewer alternatives, or begin them with text"
                )


def _rules_that_can_be(rules: dict[str, _Rule], *, of_characters: bool) -> set[str]:
    """The rules that match some text; of_characters=False: that match the empty text."""
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for alternative in rule.alternatives:
            for part, _ in alternative:
                if part is not None:
                    users.setdefault(part, []).append(name)
    found: set[str | None] = {_TERMINAL} if of_characters else set()
    todo = list(rules)
    while todo:
        name = todo.pop()
        if name not in found and any(
            all(part in found for part, _ in sequence) for sequence in rules[name].alternatives
        ):
            found.add(name)
            todo += users.get(name, [])
    return {name for name in found if name is not None}


def _beginnings(rule: _Rule, empty: set[str]) -> Iterator[tuple[str, int, bool]]:
    """The rules that a rule can begin with: how often each, and whether more follows it."""
    for alternative in rule.alternatives:
        for i, (part, times) in enumerate(alternative):
            if part is None:
                break
            yield part, times, times > 1 or i + 1 < len(alternative)
            if part not in empty:
                break


def _components(rules: dict[str, _Rule], empty: set[str]) -> Iterator[list[str]]:
    """Strongly connected groups of rules that begin with each other, innermost first (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    done: set[str] = set()
    for root in rules:
        if root in order:
            continue
        path = [(root, _beginnings(rules[root], empty))]
        order[root] = lowest[root] = len(order)
        waiting.append(root)
        while path:
            name, beginnings = path[-1]
            for begins, _, _ in beginnings:
                if begins not in order:
                    order[begins] = lowest[begins] = len(order)
                    waiting.append(begins)
                    path.append((begins, _beginnings(rules[begins], empty)))
                    break
                if begins not in done:
                    lowest[name] = min(lowest[name], order[begins])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == order[name]:
                    first = waiting.index(name) if waiting[-1] != name else len(waiting) - 1
                    group = waiting[first:]
                    del waiting[first:]
                    done.update(group)
                    yield group


def _written(name: str) -> str:
    """The name that the user wrote, without the suffix of a generated rule."""
    return name.partition("_")[0]


def _code_point(char: str) -> int:
    if len(char) == 1:
        return ord(char)
    if char[1] in "xuU":
        return int(char[2:], 16)
    return ord({"t": "\t", "r": "\r", "n": "\n"}.get(char[1], char[1]))
