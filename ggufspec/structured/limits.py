"""Makes matchers with limits for llguidance, and shortens its error messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS = LLParserLimits(
    max_grammar_size=30_000,
    max_items_in_row=20_000,  # 4 per optional property: the default, 2,000, would allow 500
    max_lexer_states=50_000,  # 1 to 2 KB each
    verbose_errors=False,
)
# By default, a mask allows one of the tokenizations of a forced text.
_ALL_TOKENIZATIONS = '%llguidance {"no_forcing": true}'
_MAX_COMPLAINT = 200
END = 256  # of byte_tokenizer
JSON_START = "start: %json "  # of a grammar that matches nothing but JSON


class TokenTexts:
    """A vocabulary as llguidance reads it. It need not tokenize: masks do not force text."""

    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special: Collection[int], end: int) -> None:
        self.tokens = pieces
        self.special_token_ids = sorted(special)
        self.eos_token_id = end

    def __call__(self, text: bytes | str) -> list[int]:
        return []


@cache
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer with one token per byte, and END, which ends a text."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    return LLTokenizer(TokenizerWrapper(TokenTexts(tokens, [END], END)))


def limited_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the beginning of a text; `is_error()` is True if it cannot be compiled."""
    source = f"{lark}\n{_ALL_TOKENIZATIONS}\n"
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def summary(complaint: str) -> str:
    """An error message of llguidance in one short line, without dumps and backtraces."""
    first, *rest = complaint.strip().split("\n") if complaint else [""]
    first = first.partition("<")[0] if "backtrace" in first else first
    if "limits." in first or "limit for this grammar" in first:
        return "it is too complex; simplify it"
    first = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", first)
    first = first.replace("NoExtensionBias", "no token is allowed")
    if len(first) > _MAX_COMPLAINT:
        first = f"{first[:_MAX_COMPLAINT]} ..."
    # The error of a regular expression is on a separate line.
    return " ".join([first, *[line for line in rest if line.startswith("error: ")][:1]])
