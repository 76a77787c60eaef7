"""What counts as the right answer under load."""

from __future__ import annotations

import pytest

from tests.benchmarks.soak import is_likeliest

LIKELY = [
    {" a": -0.1, " b": -0.2, " c": -3.0},
    {" d": -0.5, " e": -0.6},
    {" f": -0.1, " g": -4.0},
]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (" a d f", True),
        (" b anything after a near tie", True),
        (" a e", True),
        (" c d f", False),
        (" a d g", False),
        (" an answer to somebody else", False),
        ("", False),
    ],
)
def test_a_text_may_part_from_the_likeliest_where_rounding_decides(
    text: str, is_right: bool
) -> None:
    assert is_likeliest(text, LIKELY) == is_right


def test_where_nobody_tells_what_is_likely_nothing_is_excused() -> None:
    assert not is_likeliest("a", [])
