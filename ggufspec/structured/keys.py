"""Follows JSON as it is written, and finds the tokens that would repeat a key of an object."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.structured.limits import JSON_START

_COMMENT = "// JSON begins after: "
_MARK = re.compile(rb'[{}\[\],"]')
_IN_STRING = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_COMMA_AFTER_STRING = re.compile(rb'".*,', re.DOTALL)


class Level(NamedTuple):
    """An open object with its keys as they are written (without quotes), or an open array."""

    parent: Level | None
    keys: frozenset[bytes] | None  # None: an array


class KeyPlace(NamedTuple):
    """A position in JSON. `begun`: a key so far; in another string, a backslash that ends it."""

    level: Level | None = None
    where: Literal["before JSON", "value", "before key", "key", "string"] = "value"
    begun: bytes = b""

    def after(self, text: bytes) -> KeyPlace | None:
        """The position after more text; None if the text repeats a key."""
        (level, where, begun), at = self, 0
        while True:
            if where in ("key", "string"):
                string = begun + text[at:]
                match = _IN_STRING.match(string)
                assert match is not None
                n = match.end()
                if string[n : n + 1] != b'"':
                    return KeyPlace(level, where, string if where == "key" else string[n:])
                if where == "key":
                    assert level is not None
                    assert level.keys is not None
                    if string[:n] in level.keys:
                        return None
                    level = Level(level.parent, level.keys | {string[:n]})
                at += n + 1 - len(begun)
                where, begun = "value", b""
            elif (mark := _MARK.search(text, at)) is None:
                return KeyPlace(level, where)
            else:
                at = mark.end()
                if mark[0] == b'"':
                    where = "key" if where == "before key" else "string"
                    continue
                if mark[0] in b"{[":
                    level = Level(level, frozenset() if mark[0] == b"{" else None)
                elif mark[0] != b",":
                    level = level and level.parent
                is_next = mark[0] in b"{," and level is not None and level.keys is not None
                where = "before key" if is_next else "value"

    @property
    def is_json(self) -> bool:
        return self.where != "before JSON"

    @property
    def rests(self) -> list[bytes]:
        """What would complete the key that is begun, or that comes next, to one that is there."""
        if self.level is None or not self.level.keys or self.where not in ("before key", "key"):
            return []
        n = len(self.begun)
        return [key[n:] for key in self.level.keys if key.startswith(self.begun)]


class JsonStart(NamedTuple):
    """Where JSON begins in a text: after the first `end`, or at once without one.

    A text that does not begin with `begin` is JSON from its first byte.
    """

    begin: bytes = b""
    end: bytes = b""

    @property
    def comment(self) -> str:
        """A line for a grammar in Lark that says so; see `of`."""
        return f"{_COMMENT}{json.dumps([self.begin.decode(), self.end.decode()])}\n"

    @staticmethod
    def of(grammar: str) -> JsonStart | None:
        """Where JSON begins in the texts of a grammar; None: nowhere, or unknown."""
        if grammar.startswith(JSON_START):
            return JsonStart()
        if not grammar.startswith(_COMMENT):
            return None
        begin, end = json.loads(grammar[len(_COMMENT) :].partition("\n")[0])
        return JsonStart(begin.encode(), end.encode())

    def place(self, text: bytes) -> KeyPlace | None:
        """The position after a text, or after the text that the `begun` of a position stands for;
        None if it repeats a key."""
        begin, end = self
        if not end or not (text.startswith(begin) or begin.startswith(text)):
            return KeyPlace().after(text)
        before, found, json_text = text[len(begin) :].partition(end)
        if found:
            return KeyPlace().after(json_text)
        return KeyPlace(
            None, "before JSON", text[: len(begin)] + before[1 - len(end) or len(before) :]
        )


class KeyTokens:
    """The tokens of a vocabulary that have to do with keys. Making it takes 50 ms."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._quoted = sorted((piece, i) for i, piece in enumerate(pieces) if b'"' in piece)
        # Tokens that have both quotes of a string, by that string; and those that have one twice.
        whole: defaultdict[bytes, set[int]] = defaultdict(set)
        twice: set[int] = set()
        for piece, token in self._quoted:
            quotes = [at for at, byte in enumerate(piece) if byte == ord('"')]
            for first, last in combinations(quotes, 2):
                string = piece[first + 1 : last]
                if token in whole[string]:
                    twice.add(token)
                whole[string].add(token)
        self._whole = {string: np.array(sorted(tokens)) for string, tokens in whole.items()}
        self._twice = np.array(sorted(twice), np.int64)

    def repeating(self, place: KeyPlace, mask: NDArray[np.uint32]) -> Iterator[int]:
        if place.where == "key":
            for rest in place.rests:
                start = rest + b'"'
                at = bisect_left(self._quoted, (start,))
                while at < len(self._quoted) and self._quoted[at][0].startswith(start):
                    yield self._quoted[at][1]
                    at += 1
        several, level = [self._twice], place.level
        while level is not None:
            several += [self._whole[key] for key in level.keys or () if key in self._whole]
            level = level.parent
        for token in {token for tokens in several for token in _in_mask(tokens, mask)}:
            if place.after(self._pieces[token]) is None:
                yield token

    def towards(self, place: KeyPlace, mask: NDArray[np.uint32]) -> Iterator[int]:
        """The tokens of a mask after which a key is next, or begun, of which `rests` are left.

        In a key, tokens that are not in the mask are among them.
        """
        if place.where == "key":
            starts = {rest[:n] for rest in place.rests for n in range(1, len(rest) + 1)}
            yield from (token for start in starts for token in self._by_piece.get(start, ()))
            return
        marked = self._marked.get(place.where)
        for token in _all_in(mask) if marked is None else _in_mask(marked, mask):
            after = place.after(self._pieces[token])
            if after is not None and after.rests:
                yield token

    def lead_elsewhere(self, place: KeyPlace, mask: NDArray[np.uint32]) -> bool:
        """Whether a token of a mask, without `repeating`, leads to none of the `rests`."""
        if place.where == "key":
            left = mask.copy()
            clear(left, self.towards(place, mask))
            return bool(left.any())
        afters = (place.after(self._pieces[token]) for token in _all_in(mask))
        return any(after is not None and not after.rests for after in afters)

    @cached_property
    def _by_piece(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for token, piece in enumerate(self._pieces):
            found.setdefault(piece, []).append(token)
        return found

    @cached_property
    def _marked(self) -> dict[str, NDArray[np.int64]]:
        """The tokens that may lead to a key from within another string, or from elsewhere."""
        tests: dict[str, Callable[[bytes], object]] = {
            "string": _COMMA_AFTER_STRING.search,
            "value": lambda piece: b"," in piece or b'"' in piece,
        }
        return {
            where: np.array([i for i, piece in enumerate(self._pieces) if test(piece)], np.int64)
            for where, test in tests.items()
        }


def clear(mask: NDArray[np.uint32], tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def _in_mask(tokens: NDArray[np.int64], mask: NDArray[np.uint32]) -> list[int]:
    found: list[int] = tokens[
        (mask[tokens // 32] >> (tokens % 32).astype(np.uint32)) & 1 != 0
    ].tolist()
    return found


def _all_in(mask: NDArray[np.uint32]) -> Iterator[int]:
    for word in np.flatnonzero(mask).tolist():
        bits = int(mask[word])
        yield from (32 * word + i for i in range(32) if bits >> i & 1)
