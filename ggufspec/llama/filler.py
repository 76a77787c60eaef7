"""Ordinary text in a model's tokens, to measure with."""

from __future__ import annotations

from ggufspec.errors import PromptError
from ggufspec.llama.vocab import Vocab

# Real text, because random tokens would make a mixture-of-experts model read all its experts.
_TEXT = """\
In the year of the great frost the river stood still from one bridge to the other, and people who \
had never met each other walked across it with lanterns. A baker sold warm bread from a sledge; \
two boys had built a tower out of ice (it was 12 feet high, they said, or nearly), and an old \
captain, who trusted no water that he could not hear, watched them from the quay. "It will not \
hold," he told everybody. "Nothing holds that begins so suddenly." But it held until March.
"""


def filler_tokens(vocab: Vocab, n_tokens: int) -> list[int]:
    """`n_tokens` of English text; arbitrary tokens if the vocabulary cannot write it."""
    try:
        tokens = vocab.tokenize(_TEXT, add_special=False, parse_special=False)
    except PromptError:
        tokens = []
    tokens = [token for token in tokens if 0 <= token < vocab.n_tokens]
    tokens = [token for token in tokens if token not in vocab.stop_tokens]
    if len(set(tokens)) < 2:
        tokens = [token for token in range(vocab.n_tokens) if token not in vocab.stop_tokens]
    tokens = tokens or list(range(vocab.n_tokens))
    return [tokens[i % len(tokens)] for i in range(n_tokens)]
