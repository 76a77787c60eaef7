"""The built-in prompts: texts to continue freely, and repetitive texts.

Repetitive prompts are short, since the embedded pair was trained on windows of 256 tokens. It
continues the first two at temperature 0, and the second also at 0.7, but not the code.
"""

from __future__ import annotations

OPEN = (
    "The coach left the village before it was light, and nobody but the old miller saw who sat in",
    "My uncle never spoke of the summer when the river rose, but one evening after supper he",
    '"You are late," said the countess without turning from the window. The young man',
)

_COUNTRY = "and I have been in the country, "
_CONTENTS = "1. . . . 2. . . . 3. . . .\n"
_FUNCTION = (
    "def add(first, second):\n    total = first + second\n    print(total)\n    return total\n\n"
)

REPETITIVE = (
    f"I have been in the house, {4 * _COUNTRY}and I",
    3 * _CONTENTS + "1.",
    2 * _FUNCTION + "def add(first, second):\n    total =",
)

KINDS = {"open": OPEN, "repetitive": REPETITIVE}
