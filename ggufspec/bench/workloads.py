"""The prompts of the benchmarks: texts to continue freely, and texts to copy from. Only constants.

The embedded pair was trained on windows of 256 tokens and follows no instructions: a repetitive
prompt says a passage twice or thrice and begins it again, and is short.
"""

from __future__ import annotations

OPEN = (
    "The coach left the village before it was light, and nobody but the old miller saw who sat in",
    "My uncle never spoke of the summer when the river rose, but one evening after supper he",
    '"You are late," said the countess without turning from the window. The young man',
)

_CARTER = (
    "The carter harnessed the grey horse, put on his hat, and drove slowly down to the mill; "
    "and the dog ran behind him.\n"
)
_LETTER = (
    '"My dear sister," wrote the captain, "we are all well, and we hope to be at home in June."\n'
)
_FUNCTION = (
    "def add(first, second):\n    total = first + second\n    print(total)\n    return total\n\n"
)

REPETITIVE = (
    3 * _CARTER + "The carter harnessed",
    3 * _LETTER + '"My dear sister," wrote',
    2 * _FUNCTION + "def add(first, second):\n    total =",
)

KINDS = {"open": OPEN, "repetitive": REPETITIVE}
