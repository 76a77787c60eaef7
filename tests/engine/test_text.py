"""Text comes out whole: characters and stop strings that span tokens."""

from __future__ import annotations

import random

import pytest

from ggufspec.engine.text import TextStream


def feed(stream: TextStream, pieces: list[bytes]) -> str:
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.ended_by is not None:
            return text
    return text + stream.finish()


def split(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_text_is_whole_however_its_bytes_are_split() -> None:
    rng = random.Random(0)
    text = "né 🙂🙃 日本語, ﷽ end"
    for _ in range(300):
        assert feed(TextStream(), split(text.encode(), rng)) == text


def test_broken_bytes_become_replacement_characters() -> None:
    assert feed(TextStream(), [b"a\xf0\x9f", b"b\xff"]) == "a\ufffdb\ufffd"


def test_an_incomplete_character_at_the_end_is_left_out() -> None:
    assert feed(TextStream(), [b"a\xf0\x9f"]) == "a"
    assert feed(TextStream(["b\n"]), [b"ab\xf0\x9f"]) == "ab"


@pytest.mark.parametrize(
    ("before", "pieces", "text"),
    [
        (b"a\xf0\x9f", [b"\x99", b"\x82", b"b"], "b"),
        ("日".encode()[1:] + b"\xe6", [b"\x97\xa5!"], "!"),
        (b"a\xe6", [b"a\x97"], "a\ufffd"),
        (b"", [b"\x97a"], "\ufffda"),
        ("日".encode(), [b"\x97a"], "\ufffda"),
    ],
)
def test_the_rest_of_a_character_of_the_prompt_is_left_out(
    before: bytes, pieces: list[bytes], text: str
) -> None:
    assert feed(TextStream(before=before), pieces) == text


def test_a_stop_string_ends_the_text_however_it_is_split() -> None:
    rng = random.Random(1)
    for _ in range(500):
        stream = TextStream(["###", "\n\nUser:"])
        assert feed(stream, split(b"Hello #1 and ## two\n\nUser: more ###", rng)) == (
            "Hello #1 and ## two"
        )
        assert stream.ended_by == "\n\nUser:"


def test_what_might_become_a_stop_string_is_held_back_and_released() -> None:
    stream = TextStream(["STOP"])
    assert [stream.push(piece) for piece in (b"go ST", b"OR", b"E STO")] == ["go ", "STOR", "E "]
    assert stream.finish() == "STO"
    assert stream.ended_by is None


def test_the_first_of_several_stop_strings_wins() -> None:
    stream = TextStream(["lo wo", "lo"])
    assert stream.push(b"hello world") == "hel"
    assert stream.ended_by == "lo"


def test_overlapping_beginnings_are_not_missed() -> None:
    stream = TextStream(["aab"])
    assert feed(stream, [b"a", b"a", b"a", b"b", b"c"]) == "a"
    assert stream.ended_by == "aab"


def test_a_thousand_stop_strings_are_found_as_one_is() -> None:
    rng = random.Random(3)
    stops = ["".join(rng.choices("ab", k=rng.randint(9, 14))) for _ in range(1000)]
    text = "".join(rng.choices("abbb c", k=20_000))
    first = min(text.index(stop) for stop in stops if stop in text)
    stream = TextStream(stops)
    assert feed(stream, split(text.encode(), rng)) == text[:first]
    assert stream.ended_by == next(stop for stop in stops if text.startswith(stop, first))


def written(text: str, min_indent: int, n_bytes: int) -> tuple[str, bool]:
    stream, data = TextStream((), b"", min_indent), text.encode()
    parts = [stream.push(data[i : i + n_bytes]) for i in range(0, len(data), n_bytes)]
    return "".join([*parts, stream.finish()]), stream.has_ended


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 100])
def test_a_text_ends_before_a_line_with_less_indentation(n_bytes: int) -> None:
    assert written("a\n    b\n\n    c\n  d", 4, n_bytes) == ("a\n    b\n\n    c", True)
    assert written("a\n\tb\nc", 1, n_bytes) == ("a\n\tb", True)
    assert written("a\n    b\n  ", 4, n_bytes) == ("a\n    b\n  ", False)
    assert written("a\n      b", 4, n_bytes) == ("a\n      b", False)
    assert written("a\nb", 0, n_bytes) == ("a\nb", False)
