"""Which responses count as correct under load."""

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
        (" the response of another client", False),
        ("", False),
    ],
)
def test_a_text_may_differ_from_the_likeliest_at_a_near_tie(text: str, is_right: bool) -> None:
    assert is_likeliest(text, LIKELY) == is_right


def test_without_probabilities_every_difference_is_an_error() -> None:
    assert not is_likeliest("a", [])
