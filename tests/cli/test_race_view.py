"""The replay of a race: nothing appears too early, it fits the terminal, text cannot do harm."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest
from bench.test_race import EMPTY, RACE, WORDS, lane
from rich.cells import cell_len
from rich.console import Console

from ggufspec.bench.race import Race
from ggufspec.cli.race_view import picture
from ggufspec.common.facts import visible

HOSTILE = (
    "<b>&]]> \x1b[31mred\x1b]0;title\x07 \x9b2J \ud800 \udfff\ufffe\uffff"
    "\x00\x08\x7f \u202eback \r\n\ttab \u2028 \U0001f600 日本 e\u0301 "
)
EVIL = Race(
    HOSTILE, lane("plain", (0.1, HOSTILE, 3, False)), lane("spec", (0.1, HOSTILE, 3, True)), 0.8
)


def rows(
    race: Race, seconds: float, width: int = 100, height: int = 30, **how: object
) -> list[str]:
    """The rows of a picture on a terminal of that size; without colours unless asked for."""
    encoding = str(how.pop("encoding", "utf-8"))
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    options = {"color_system": None, "force_terminal": True, **how}
    console = Console(file=file, width=width, legacy_windows=False, **options)  # type: ignore[arg-type]
    console.print(picture(race, seconds, console, height))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


def words(shown: list[str]) -> list[str]:
    return [word for word in " ".join(shown).split() if word in WORDS]


@pytest.mark.parametrize(("width", "height"), [(30, 14), (79, 8), (80, 30)])
@pytest.mark.parametrize("race", [RACE, EVIL, EMPTY], ids=["race", "evil", "empty"])
def test_a_picture_fits_its_terminal(race: Race, width: int, height: int) -> None:
    pictures = [rows(race, seconds, width, height) for seconds in (0.0, 0.7, 3.0, 99.0)]
    assert all(cell_len(row) <= width for shown in pictures for row in shown)
    (n_rows,) = {len(shown) for shown in pictures}  # nothing jumps
    assert height < 14 or n_rows <= height


@pytest.mark.parametrize("width", [60, 100])
def test_a_picture_shows_nothing_before_its_time(width: int) -> None:
    assert words(rows(RACE, 0.0, width)) == []
    assert "0 of 12" in " ".join(rows(RACE, 0.0, width))
    early, end = rows(RACE, 0.6, width), rows(RACE, 6.0, width)
    assert sorted(words(early)) == sorted(["ten", "ten", "quick", "brown"])
    assert "2.0 tokens/s" in " ".join(early)
    assert "2.50 times as fast so far" in early[-1]
    assert sorted(words(end)) == sorted(WORDS * 2)
    assert "12 tokens in 2.40 s" in " ".join(end)
    assert "2.50 times as fast" in end[-1]
    assert "so far" not in end[-1]


def test_words_do_not_move_while_they_come() -> None:
    before: dict[str, tuple[int, int]] = {}
    for seconds in (0.6, 1.2, 1.8, 2.4):
        places = {
            word: (i, row.rindex(f" {word}"))
            for i, row in enumerate(rows(RACE, seconds, 80))
            for word in words([row[40:]])
        }
        assert places.items() >= before.items()
        before = places
    assert set(before) == set(WORDS)


def test_long_texts_scroll() -> None:
    text = " ".join(rows(RACE, 6.0, 30, 14))
    assert text.count("away") == 2
    assert "quick" not in text


def test_drafted_words_are_green() -> None:
    shown = "".join(rows(RACE, 6.0, color_system="standard"))
    green = "".join(re.findall("\x1b\\[32m(.*?)\x1b\\[0m", shown))
    assert "ten quick" in green
    assert "brown" not in green


def test_a_terminal_without_other_characters() -> None:
    assert "\n".join(rows(RACE, 6.0, encoding="ascii")).isascii()


def test_text_that_controls_a_terminal_is_shown_escaped() -> None:
    shown = rows(EVIL, 99.0)
    letters = set("".join(shown))
    assert not {unicodedata.category(letter) for letter in letters} & {"Cc", "Cf", "Cs", "Cn"}
    text = visible(HOSTILE)
    assert "日本 e\u0301" in text
    assert "\\x1b[31mred" in text
    assert "👩\u200d🚀" in visible("👩\u200d🚀"), "joiners hold emoji together"
