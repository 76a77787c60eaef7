"""Races and their recordings: nothing appears too early, and text cannot do harm."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec.bench.race import (
    Lane,
    Race,
    TimedText,
    first_difference,
    frame_times,
    state_at,
    verdict,
)
from ggufspec.bench.race_frame import ASCII, SpanRow, frame, lay_out
from ggufspec.bench.race_svg import svg
from ggufspec.bench.race_text import cropped, harmless, lines_of, n_cells_of, shown
from ggufspec.bench.recording import CAST_HEIGHT, CAST_WIDTH, ansi, cast, recording
from ggufspec.decoding.stats import summarize
from ggufspec.decoding.types import Round
from ggufspec.errors import OptionError

HOSTILE = (
    '<script>alert("1")</script> & ]]> \x1b[31mred\x1b]0;title\x07 \x9b2J \ud800 \udfff\ufffe\uffff'
    "\x00\x08\x7f \u202eback \r\n\ttab \u2028 \U0001f600 日本 e\u0301 "
)
SVG = "{http://www.w3.org/2000/svg}"


def lane(name: str, *pieces: tuple[float, str, int, bool]) -> Lane:
    """With token ids that number the tokens."""
    found = tuple(TimedText(*piece) for piece in pieces)
    n_tokens = sum(piece.n_tokens for piece in found)
    rounds = [Round([0] * p.n_tokens, p.n_tokens, p.n_tokens - 1, 0, 0, 0) for p in found]
    stats = summarize(
        rounds,
        n_prompt=1,
        n_prompt_reused=0,
        n_generated=n_tokens,
        prompt_seconds=0,
        generation_seconds=found[-1].seconds if found else 0,
        decode_seconds=0,
    )
    return Lane(name, found, tuple(range(n_tokens)), "length", stats)


WORDS = [
    "ten",
    "quick",
    "brown",
    "foxes",
    "jump",
    "over",
    "nine",
    "lazy",
    "dogs",
    "then",
    "run",
    "away",
]
PLAIN = lane("plain", *((0.5 * i, f" {word}", 1, False) for i, word in enumerate(WORDS, 1)))
FAST = lane(
    "speculative",
    *(
        (0.6 * (i // 3 + 1), "".join(f" {word}" for word in part), len(part), drafted)
        for i in range(0, len(WORDS), 3)
        for part, drafted in ((WORDS[i : i + 2], True), (WORDS[i + 2 : i + 3], False))
        if part
    ),
)
RACE = Race("Once", PLAIN, FAST, 0.0)
EVIL = Race(
    HOSTILE, lane("plain", (0.1, HOSTILE, 3, False)), lane("spec", (0.1, HOSTILE, 3, True)), 0.8
)
EMPTY = Race("Once", lane("plain"), lane("speculative"), 0.0)


def letters(rows: list[SpanRow]) -> str:
    return "\n".join("".join(span.text for span in row) for row in rows)


def words(text: str) -> list[str]:
    return [word for word in text.split() if word in WORDS]


# State at a time


def test_no_text_is_shown_before_its_time() -> None:
    assert state_at(PLAIN, 0.0) == (replace(state_at(PLAIN, 0.0), n_pieces=0, n_tokens=0))
    assert state_at(PLAIN, 0.49).tokens_per_second is None
    assert state_at(PLAIN, 0.5).n_tokens == 1
    now = state_at(PLAIN, 3.2)
    assert (now.n_tokens, now.share, now.tokens_per_second) == (6, 0.5, 2.0)
    assert not now.finished


def test_a_finished_lane_keeps_its_speed() -> None:
    for seconds in (FAST.seconds, 100.0):
        now = state_at(FAST, seconds)
        assert now.finished
        assert now.tokens_per_second == FAST.stats.tokens_per_second == pytest.approx(12 / 2.4)


def test_speedup_and_the_end() -> None:
    assert RACE.speedup == pytest.approx(2.5)
    assert RACE.seconds == PLAIN.seconds == 6.0
    assert EMPTY.speedup is None
    assert EMPTY.seconds == 0.0


def test_times_end_with_the_race() -> None:
    assert frame_times(RACE, 2.5) == [0.0, 2.5, 5.0, 6.0]
    assert frame_times(RACE, 2.0) == [0.0, 2.0, 4.0, 6.0]
    assert frame_times(EMPTY, 1.0) == [0.0]


def test_the_first_differing_token_is_found() -> None:
    assert first_difference([1, 2, 3], (1, 2, 3)) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_verdict_on_the_texts() -> None:
    assert "the same, all 12 tokens" in verdict(RACE)
    other = replace(RACE, speculative=replace(FAST, tokens=(0, 1, 99)))
    assert "differ from token 3 on:" in verdict(other)
    assert "round differently" in verdict(other)
    assert "same distribution" in verdict(replace(other, temperature=0.8))


def test_sampled_texts_without_a_draft_are_not_the_same_by_chance() -> None:
    sampled = replace(RACE, temperature=0.8)
    assert "by chance" in verdict(sampled)
    plain = replace(FAST, stats=replace(FAST.stats, n_drafted=0))
    assert "nothing was drafted" in verdict(replace(sampled, speculative=plain))


# Text


def test_lines_keep_all_words_in_order_and_fit() -> None:
    for width in (5, 9, 20, 200):
        lines = lines_of(FAST.pieces, width)
        text = " ".join("".join(run.text for run in line) for line in lines)
        assert text.split() == WORDS
        for line in lines:
            assert sum(run.n_cells for run in line) <= width
            assert [run.column for run in line] == [
                sum(run.n_cells for run in line[:i]) for i in range(len(line))
            ]


def test_a_word_that_is_too_long_is_broken_and_newlines_and_indents_stay() -> None:
    lines = lines_of([TimedText(0, "abcdefgh ij\n\n  k", 1, False)], 3)
    assert ["".join(run.text for run in line) for line in lines] == [
        *("abc", "def", "gh", "ij", "", "  k")
    ]


def test_wide_letters_take_two_cells() -> None:
    assert n_cells_of("日本e\u0301x") == 6
    lines = lines_of([TimedText(0, "日本語日本語", 1, False)], 5)
    assert ["".join(run.text for run in line) for line in lines] == ["日本", "語日", "本語"]


def test_lines_of_pieces_do_not_move_while_they_come() -> None:
    lines = lines_of(FAST.pieces, 12)
    before: list[str] = []
    for n_pieces in range(len(FAST.pieces) + 1):
        now = ["".join(run.text for run in line) for line in shown(lines, n_pieces)]
        assert all(new.startswith(old) for old, new in zip(before, now, strict=False))
        before = now
    assert shown(lines, len(FAST.pieces)) == lines


def test_only_the_tail_of_a_long_text_is_shown() -> None:
    layout = lay_out(RACE, 30, 14)
    last = ["".join(run.text for run in lines[-1]) for lines in layout.lines]
    text = letters(frame(layout, 6.0))
    assert len(layout.lines[0]) > layout.n_text_rows
    assert all(line in text for line in last)
    assert "".join(run.text for run in layout.lines[0][0]) not in text


def test_harmless_text_has_no_commands() -> None:
    text = harmless(HOSTILE)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202e\ufffe\uffff]", text)
    assert "日本 e\u0301" in text
    assert "👩\u200d🚀" in harmless("👩\u200d🚀"), "joiners hold emoji together"
    assert "back" in text


def test_cropped() -> None:
    assert cropped("one  two\nthree", 50) == "one two three"
    assert cropped("one two three", 8) == "one two…"
    assert cropped("日本語", 5) == "日本…"
    assert cropped("abc", 0) == ""


# Frames


@pytest.mark.parametrize("width", [30, 60, 79, 80, 100, 200])
@pytest.mark.parametrize("height", [1, 8, 14, 30])
@pytest.mark.parametrize("race", [RACE, EVIL, EMPTY])
def test_a_frame_fits_its_terminal(race: Race, width: int, height: int) -> None:
    layout = lay_out(race, width, height)
    sizes = set()
    for seconds in (0.0, 0.7, 3.0, 99.0):
        rows = frame(layout, seconds)
        sizes.add(len(rows))
        assert all(n_cells_of("".join(span.text for span in row)) <= width for row in rows)
        walls = [row for row in rows if row[0].text in ("│", "╭─ ", "╰")]
        assert len({n_cells_of("".join(span.text for span in row)) for row in walls}) <= 1
    assert len(sizes) == 1, "nothing jumps"
    if height >= 12:
        assert sizes.pop() <= height


@pytest.mark.parametrize("width", [60, 100])
def test_a_frame_shows_nothing_before_its_time(width: int) -> None:
    layout = lay_out(RACE, width, 40)
    assert words(letters(frame(layout, 0.0))) == []
    assert "0 of 12" in letters(frame(layout, 0.0))
    text = letters(frame(layout, 0.6))
    assert sorted(words(text)) == sorted(["ten", "ten", "quick", "brown"])
    assert "2.0 tokens/s" in text
    assert "2.50 times as fast so far" in text
    text = letters(frame(layout, 6.0))
    assert sorted(words(text)) == sorted(WORDS * 2)
    assert "12 tokens in 2.40 s" in text
    assert "2.50 times as fast" in text
    assert "so far" not in text


def test_drafted_words_have_their_style() -> None:
    rows = frame(lay_out(RACE, 100, 40), 6.0)
    styles = {
        style: "".join(t for row in rows for t, s in row if s == style)
        for style in ("drafted", "text")
    }
    assert "ten quick" in styles["drafted"]
    assert "brown" in styles["text"]
    assert styles["drafted"].count("brown") == 0


def test_long_texts_scroll() -> None:
    layout = lay_out(RACE, 30, 14)
    assert layout.n_text_rows == 2
    text = letters(frame(layout, 6.0))
    assert text.count("away") == 2
    assert "quick" not in text


def test_ascii_frames() -> None:
    assert letters(frame(lay_out(RACE, 100, 20, ASCII), 3.0)).isascii()


# Recordings


def screens(text: str) -> list[tuple[float, str]]:
    """A cast as a terminal shows it after each event: only what our own casts use."""
    lines: dict[int, str] = {}
    found = []
    for event in map(json.loads, text.splitlines()[1:]):
        for row, _, content in re.findall(
            r"\x1b\[(\d+);(\d+)H(?:\x1b\[2K)?(.*?)(?=\x1b\[\d+;\d+H|$)", event[2], re.DOTALL
        ):
            lines[int(row)] = re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", content)
        found.append((event[0], "\n".join(lines[row] for row in sorted(lines))))
    return found


@pytest.mark.parametrize("race", [RACE, EVIL, EMPTY])
def test_a_cast_is_an_asciicast(race: Race) -> None:
    header, *events = map(json.loads, cast(race).splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, CAST_WIDTH, CAST_HEIGHT)
    assert [len(event) for event in events] == [3] * len(events)
    assert {event[1] for event in events} == {"o"}
    at = [event[0] for event in events]
    assert at == sorted(at)
    data = "".join(event[2] for event in events)
    assert data.endswith("\x1b[?25h"), "the cursor comes back"
    assert re.findall("\x1b(?!\\[[?0-9;]*[HJKmlh])", data) == [], "nothing but what we draw"
    data.encode("utf-8")


def test_a_cast_shows_nothing_before_its_time() -> None:
    for seconds, screen in screens(cast(RACE)):
        due = sum(p.n_tokens for ln in RACE.lanes for p in ln.pieces if p.seconds <= seconds + 1e-3)
        assert len(words(screen)) <= due
    assert sorted(words(screens(cast(RACE))[-1][1])) == sorted(WORDS * 2)


def test_a_cast_at_twice_the_speed_takes_half_the_time() -> None:
    slow, fast = (json.loads(cast(RACE, speed).splitlines()[-2])[0] for speed in (1.0, 2.0))
    assert (slow, fast) == (6.0, 3.0)


def test_drafted_words_are_green_in_a_cast() -> None:
    assert "\x1b[32mten quick" in cast(RACE).replace("\\u001b", "\x1b")
    assert ansi(frame(lay_out(RACE, 100, 20), 6.0)[0]).startswith("\x1b[2m")


def visible(text: ET.Element, style: str) -> tuple[float, bool]:
    """From which share of the loop a text is seen, and whether it is at the end."""
    name = next(part for part in (text.get("class") or "").split() if re.fullmatch(r"k\d+", part))
    match = re.search(rf"@keyframes {name}{{(.*?}})}}", style)
    assert match
    starts = re.findall(r"([\d.]+)%\{visibility:visible\}", match[1])
    return float(starts[0]), match[1].endswith("to{visibility:visible}")


@pytest.mark.parametrize("race", [RACE, EVIL, EMPTY], ids=["race", "evil", "empty"])
def test_a_picture_is_xml_that_stands_alone(race: Race) -> None:
    text = svg(race)
    root = ET.fromstring(text.encode("utf-8"))
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "style", "rect", "g", "text", "tspan"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on") or "href" in name}
    assert "url(" not in text
    assert "@import" not in text
    assert "<!" not in text
    assert text.count("http") == 1, "the name space"


def test_a_picture_has_the_text_each_piece_at_its_time() -> None:
    root = ET.fromstring(svg(RACE))
    style = root.findtext(f"{SVG}style") or ""
    inner = root.findall(f".//{SVG}svg")
    assert len(inner) == 2
    for contender, element in zip(RACE.lanes, inner, strict=True):
        runs = element.findall(f".//{SVG}text")
        assert " ".join(run.text or "" for run in runs).split() == contender.text.split()
        loop = 0.8 + RACE.seconds + 4.0
        for run in runs:
            share, stays = visible(run, style)
            piece = next(p for p in contender.pieces if (run.text or "") in p.text)
            assert stays
            assert share == pytest.approx(100 * (0.8 + piece.seconds) / loop, abs=0.01)
            assert ("d" in (run.get("class") or "").split()) == piece.drafted


def test_keyframes_of_a_picture_rise() -> None:
    for race in (RACE, EVIL):
        rules = re.findall(r"@keyframes (\w+)\{(.*?\})\}", svg(race))
        assert rules
        for _, frames in rules:
            shares = [float(share) for share in re.findall(r"([\d.]+)%", frames)]
            assert shares == sorted(shares)
            assert all(0 <= share <= 100 for share in shares)


def test_a_picture_of_a_long_text_scrolls_and_stays_small() -> None:
    long = lane("plain", *((0.03 * i, f" word{i}", 1, False) for i in range(1, 401)))
    text = svg(Race("Once", long, replace(long, name="speculative"), 0.0))
    assert "translateY(-" in text
    assert len(text) < 300_000
    assert int(ET.fromstring(text).get("height") or 0) < 600


def test_a_recording_is_what_its_name_says(tmp_path: Path) -> None:
    assert recording(RACE, tmp_path / "a.SVG") == svg(RACE).encode()
    assert recording(RACE, tmp_path / "a.cast", 2.0) == cast(RACE, 2.0).encode()
    for name in ("a.gif", "a", ".svg", "a.svg.gz"):
        with pytest.raises(OptionError, match=r"\.svg or \.cast"):
            recording(RACE, tmp_path / name)
