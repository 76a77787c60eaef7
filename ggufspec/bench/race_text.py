"""Breaks the texts of models into lines of terminal cells, without control characters."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from ggufspec.bench.race import TimedText

_JOINERS = "\u200c\u200d"  # needed by some scripts and emoji
_SPACES = str.maketrans(
    {"\t": "    ", "\r": None, "\v": "\n", "\f": "\n", "\u2028": "\n", "\u2029": "\n"}
)
_WORD_OR_SPACE = re.compile(r"\n| |[^\n ]+")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class TextRun:
    """Characters of one piece on one line. `piece`: its index in the lane."""

    text: str
    column: int  # cells to the left of it
    n_cells: int
    piece: int
    drafted: bool


TextLine = tuple[TextRun, ...]


def harmless(text: str) -> str:
    """The text without what terminals or XML parsers interpret.

    Control characters, surrogates and non-characters become U+FFFD; direction marks are removed;
    line ends and tabs become newlines and spaces.
    """
    return "".join(map(_harmless, text.translate(_SPACES)))


def n_cells_of(text: str) -> int:
    """The number of terminal cells of a harmless text."""
    return sum(map(_width, text))


def cropped(text: str, n_cells: int, *, mark: str = "…") -> str:
    """A harmless text as one line of at most `n_cells` cells."""
    flat = " ".join(text.split())
    if n_cells_of(flat) <= n_cells:
        return flat
    room = n_cells - n_cells_of(mark)
    return flat[: _n_fitting(flat, room)].rstrip() + mark if room >= 0 else ""


def lines_of(pieces: Sequence[TimedText], n_cells: int) -> list[TextLine]:
    """Break the whole text of a lane into lines of at most `n_cells` cells, at spaces if possible.

    The whole text at once, so that no word moves to another line later.
    """
    n_cells = max(n_cells, 2)  # the widest character
    texts = [harmless(piece.text) for piece in pieces]
    whole = "".join(texts)
    owners = [i for i, text in enumerate(texts) for _ in text]  # the piece of each character
    lines: list[TextLine] = []
    start = 0  # of the current line

    def break_at(end: int) -> None:
        nonlocal start
        runs: list[TextRun] = []
        column = 0
        shown = range(start, start + len(whole[start:end].rstrip(" ")))
        for i, places in groupby(shown, key=owners.__getitem__):
            text = "".join(whole[place] for place in places)
            runs.append(TextRun(text, column, n_cells_of(text), i, pieces[i].drafted))
            column += runs[-1].n_cells
        lines.append(tuple(runs))
        start = end

    for match in _WORD_OR_SPACE.finditer(whole):
        first, last = match.span()
        if match[0] == "\n":
            break_at(first)
            start = last
        elif match[0] == " ":
            if first == start and not lines:  # not at the start of the text
                start = last
        else:
            if start < first and n_cells_of(whole[start:last]) > n_cells:
                break_at(first)
            while n_cells_of(whole[start:last]) > n_cells:
                break_at(start + _n_fitting(whole[start:last], n_cells))
    if start < len(whole):
        break_at(len(whole))
    return lines


def shown(lines: Iterable[TextLine], n_pieces: int) -> list[TextLine]:
    """The lines up to the first `n_pieces` pieces."""
    found = []
    for line in lines:
        kept = tuple(run for run in line if run.piece < n_pieces)
        if line and not kept:
            break
        found.append(kept)
    while found and not found[-1]:
        found.pop()  # empty lines appear with the next text
    return found


def _n_fitting(text: str, n_cells: int) -> int:
    """How many characters fit; those without width stay with the one before."""
    return bisect_right(list(accumulate(map(_width, text))), n_cells)


def _harmless(letter: str) -> str:
    if letter == "\n" or " " <= letter <= "~":
        return letter
    category = unicodedata.category(letter)
    if category in ("Cc", "Cs") or ord(letter) & 0xFFFE == 0xFFFE:
        return _REPLACEMENT
    if category == "Cf" and letter not in _JOINERS:
        return ""
    return letter


def _width(letter: str) -> int:
    if " " <= letter <= "~":
        return 1
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
