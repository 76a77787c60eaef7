"""Compares the vocabularies of two models by their headers."""

from __future__ import annotations

from collections.abc import Iterator

from ggufspec.models.header import Header

MAX_PADDING = 128  # models of one family may pad their vocabularies to different sizes
_SPACE = "▁".encode()  # as SentencePiece stores it


def has_same_tokens(first: Header, second: Header) -> bool:
    """Whether all tokens are the same, except for padding at the end."""
    ours, theirs = first.tokens, second.tokens
    n = min(len(ours), len(theirs))
    return ours[:n] == theirs[:n] and max(len(ours), len(theirs)) - n <= MAX_PADDING


def n_common(first: Header, second: Header) -> int:
    """The number of tokens that are in both vocabularies.

    Tokens are compared as stored or, if the tokenizers are of different types, by their bytes.
    """
    kinds = [header.values.get("tokenizer.ggml.model") for header in (first, second)]
    if kinds[0] == kinds[1]:
        tokens = [set(first.tokens), set(second.tokens)]
    else:
        tokens = [_contents(first), _contents(second)]
    return len(tokens[0] & tokens[1])


def letters_of_bytes() -> Iterator[str]:
    """Each byte as a visible letter, as in GPT-2's vocabulary."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return (chr(byte if byte in seen else next(others)) for byte in range(256))


def _contents(header: Header) -> set[bytes]:
    """The bytes of each token; of a control token, its name."""
    if header.values.get("tokenizer.ggml.model") != "gpt2":
        return {token.replace(_SPACE, b" ") for token in header.tokens}
    table = {ord(letter): byte for byte, letter in enumerate(letters_of_bytes())}
    texts = (token.decode("utf-8", "replace") for token in header.tokens)
    return {text.translate(table).encode("latin-1", "replace") for text in texts}
