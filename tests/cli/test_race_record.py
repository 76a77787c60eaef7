"""Recordings of a race: nothing appears too early, and text cannot do harm."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from bench.test_race import EMPTY, RACE, WORDS, lane
from cli.test_race_view import EVIL, words

from ggufspec.bench.race import Race
from ggufspec.cli.race_view import check_recordable, recording
from ggufspec.errors import OptionError

RACES = pytest.mark.parametrize("race", [RACE, EVIL, EMPTY], ids=["race", "evil", "empty"])


def svg(race: Race, speed: float = 1.0) -> str:
    return recording(race, Path("race.SVG"), speed).decode()


def cast(race: Race, speed: float = 1.0) -> list[list[object]]:
    header, *events = map(json.loads, recording(race, Path("race.cast"), speed).splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 100, 28)
    return events


@RACES
def test_a_cast_is_an_asciicast(race: Race) -> None:
    times, kinds, data = zip(*cast(race), strict=True)
    assert set(kinds) == {"o"}
    assert list(times) == sorted(times)
    shown = "".join(map(str, data))
    assert shown.endswith("\x1b[?25h"), "the cursor comes back"
    assert not re.findall("\x1b(?!\\[[?0-9;]*[HJKmlh])|[\x00-\x1a\x1c-\x1f\x7f-\x9f]", shown)
    assert shown.count("\x1b[2J") == 1


def test_a_cast_shows_each_word_at_its_time() -> None:
    rows: dict[str, str] = {}
    for seconds, _, data in cast(RACE, speed=2.0):
        found = re.findall(r"\x1b\[(\d+);1H\x1b\[2K(.*?)(?=\x1b\[\d+;1H|$)", str(data))
        rows |= {row: re.sub(r"\x1b\[[0-9;]*m", "", text) for row, text in found}
        due = [p for each in RACE.lanes for p in each.pieces if p.seconds <= 2 * float(seconds)]  # type: ignore[arg-type]
        assert len(words(list(rows.values()))) <= sum(piece.n_tokens for piece in due)
    assert sorted(words(list(rows.values()))) == sorted(WORDS * 2)
    assert cast(RACE, speed=2.0)[-2][0] == 3.0
    assert re.search("\x1b\\[32m *ten quick", "".join(str(data) for _, _, data in cast(RACE)))


@RACES
def test_a_picture_is_xml_that_stands_alone(race: Race) -> None:
    text = svg(race)
    root = ET.fromstring(text)
    tags = {element.tag.partition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "style", "rect", "g", "circle", "text"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or "href" in name}
    assert not re.search(r"url\(|@import|<!", text)
    assert "prefers-reduced-motion" in text
    assert text.count("http") == 1, "the name space"


def test_a_picture_shows_each_word_at_its_time_and_without_animation_the_end() -> None:
    text = svg(RACE)
    loop = 0.8 + RACE.seconds + 4.0
    starts = {
        name: (float(share), end)
        for name, share, end in re.findall(
            r"@keyframes (\S+?)\{(?:0%\{visibility:hidden\})?([\d.]+)%.*?%\{visibility:(\w+)\}\}",
            text,
        )
    }
    at_end = []
    for element in ET.fromstring(text).findall(".//{*}text"):
        shown = words([element.text or ""])
        if shown:
            share, end = starts[element.get("class") or ""]
            seconds = share / 100 * loop - 0.8
            due = max(
                sum(p.n_tokens for p in each.pieces if p.seconds <= seconds + 0.01)
                for each in RACE.lanes
            )
            assert all(WORDS.index(word) < due for word in shown)
            at_end += shown if end == "visible" else []
    assert sorted(at_end) == sorted(WORDS * 2)


def test_a_picture_of_a_long_text_stays_small() -> None:
    pieces = [(0.03 * i, f" word{i}", 1, i % 2 > 0) for i in range(1, 301)]
    long = lane("plain", *pieces)
    assert len(svg(Race("Once", long, replace(long, name="speculative"), 0.0))) <= 500_000


def test_another_suffix_is_refused() -> None:
    check_recordable(Path("a.CAST"))
    for name in ("a.gif", ".svg"):
        with pytest.raises(OptionError, match=r"\.svg or \.cast"):
            check_recordable(Path(name))
