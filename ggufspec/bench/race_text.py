"""Breaks the texts of models into lines of terminal cells, without control characters."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ggufspec.bench.race import TimedText

_JOINERS = "\u200c\u200d"  # needed by some scripts and emoji
_SPACES = str.maketrans(
    {"\t": "    ", "\r": None, "\v": "\n", "\f": "\n", "\u2028": "\n", "\u2029": "\n"}
)
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
    kept, room = "", n_cells - n_cells_of(mark)
    for letter in flat:
        room -= _width(letter)
        if room < 0:
            break
        kept += letter
    return (kept.rstrip() + mark) if n_cells >= n_cells_of(mark) else ""


def lines_of(pieces: Sequence[TimedText], n_cells: int) -> list[TextLine]:
    """Break the whole text of a lane into lines of at most `n_cells` cells, at spaces if possible.

    The whole text at once, so that no word moves to another line later.
    """
    n_cells = max(n_cells, 2)  # the widest character
    lines: list[TextLine] = []
    line: list[_Cell] = []
    word: list[_Cell] = []

    def end_line() -> None:
        nonlocal line
        lines.append(_runs(line))
        line = []

    def end_word() -> None:
        nonlocal word
        if line and _size(line) + _size(word) > n_cells:
            end_line()
        while _size(word) > n_cells:
            fits = _fitting(word, n_cells)
            lines.append(_runs(word[:fits]))
            word = word[fits:]
        line.extend(word)
        word = []

    for cell in _cells(pieces):
        if cell.letter == "\n":
            end_word()
            end_line()
        elif cell.letter == " ":
            end_word()
            # Not at the start of the text, nor where a line breaks.
            if (line or lines) and _size(line) < n_cells:
                line.append(cell)
        else:
            word.append(cell)
    end_word()
    if line:
        end_line()
    return lines


def shown(lines: Iterable[TextLine], n_pieces: int) -> list[TextLine]:
    """The lines up to the first `n_pieces` pieces."""
    found = []
    for line in lines:
        if not line:
            found.append(line)
            continue
        kept = tuple(run for run in line if run.piece < n_pieces)
        if not kept:
            break
        found.append(kept)
    while found and not found[-1]:
        found.pop()  # empty lines appear with the next text
    return found


def tail(lines: Sequence[TextLine], height: int) -> Sequence[TextLine]:
    """The last lines that fit."""
    return lines[-height:] if height > 0 else ()


@dataclass(frozen=True)
class _Cell:
    letter: str
    piece: int
    drafted: bool


def _cells(pieces: Sequence[TimedText]) -> Iterable[_Cell]:
    for i, piece in enumerate(pieces):
        for letter in harmless(piece.text):
            yield _Cell(letter, i, piece.drafted)


def _size(cells: Sequence[_Cell]) -> int:
    return sum(_width(cell.letter) for cell in cells)


def _fitting(cells: Sequence[_Cell], n_cells: int) -> int:
    """How many characters fit; those without width stay with the one before."""
    ends = []
    total = 0
    for cell in cells:
        total += _width(cell.letter)
        ends.append(total)
    return bisect_right(ends, n_cells)


def _runs(cells: Sequence[_Cell]) -> TextLine:
    """Adjacent characters of one piece together; trailing spaces are dropped."""
    runs: list[TextRun] = []
    column = 0
    end = max((i + 1 for i, cell in enumerate(cells) if cell.letter != " "), default=0)
    for cell in cells[:end]:
        width = _width(cell.letter)
        last = runs[-1] if runs else None
        if last is not None and last.piece == cell.piece:
            runs[-1] = replace(last, text=last.text + cell.letter, n_cells=last.n_cells + width)
        else:
            runs.append(TextRun(cell.letter, column, width, cell.piece, cell.drafted))
        column += width
    return tuple(runs)


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
