"""Makes the text of a model safe to print on a terminal."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"  # needed by some scripts and emoji
_SPACES = str.maketrans(
    {"\t": "    ", "\r": None, "\v": "\n", "\f": "\n", "\u2028": "\n", "\u2029": "\n"}
)


def harmless(text: str) -> str:
    """The text without what a terminal interprets.

    Control characters, surrogates and non-characters become U+FFFD; direction marks are removed;
    line ends and tabs become newlines and spaces.
    """
    return "".join(map(_harmless, text.translate(_SPACES)))


def _harmless(letter: str) -> str:
    if letter == "\n" or " " <= letter <= "~":
        return letter
    category = unicodedata.category(letter)
    if category in ("Cc", "Cs") or ord(letter) & 0xFFFE == 0xFFFE:
        return "\ufffd"
    return "" if category == "Cf" and letter not in _JOINERS else letter
