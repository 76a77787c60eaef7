"""Files whose n-grams are drafted: see `draft_texts` of load."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from ggufspec.common import validate
from ggufspec.common.reading import read_text
from ggufspec.engine.pair import Pair
from ggufspec.errors import OptionError

_BLOCK = re.compile(r"(?s:.{1,65536})[^\n]*\n?")  # whole lines, so that Ctrl-C is heard between


def read_texts(paths: Sequence[str | Path]) -> list[str]:
    """The contents of UTF-8 files. Raises OptionError, PromptError."""
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise OptionError(f"draft_texts is {paths!r}; it must be a list of files")
    files = [validate.path("an entry of draft_texts", path) for path in paths]
    return [read_text(file, "the draft text") for file in files]


def add_texts(
    pair: Pair, texts: Sequence[str], progress: Callable[[str, float], None] | None
) -> None:
    """Let a pair draft from these texts; `progress` as in `load`."""
    n_done, n_all = 0, sum(map(len, texts))
    for text in texts:
        tokens = array("i")
        for block in _BLOCK.findall(text):
            tokens.extend(pair.tokens_inside(block))
            n_done += len(block)
            if progress is not None:
                progress("draft texts", n_done / n_all)
        pair.texts.add_named(tokens)
