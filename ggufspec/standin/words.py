"""The vocabulary of stand-ins: made-up words, and what tokenizes any text. Knows no map.

Bytes come first, so that any text has tokens; then the beginning and the end of a text; then words
such as " bakemo", which are tokens of their own in a prompt too (a pre-tokenizer is named that
looks for whole words before it merges). What fills a vocabulary up to its size is not used. It
depends on the size alone, and vocabularies that differ in padding begin alike, so that any two
stand-ins of one family share it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggufspec.common import gguf_bytes
from ggufspec.standin.bigram import Words

__all__ = ["vocabulary_entries"]

_BOS, _EOS = 256, 257
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama_token_type
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")


def vocabulary_entries(n_vocab: int) -> dict[str, bytes]:
    """The metadata of a tokenizer with that many tokens."""
    words = Words.of(n_vocab)
    kinds = [_NORMAL] * words.stop + [_UNUSED] * (n_vocab - words.stop)
    kinds[_BOS] = kinds[_EOS] = _CONTROL
    return dict(
        (
            gguf_bytes.string("tokenizer.ggml.model", "gpt2"),
            gguf_bytes.string("tokenizer.ggml.pre", "llama-bpe"),
            gguf_bytes.strings("tokenizer.ggml.tokens", _tokens(n_vocab, words)),
            gguf_bytes.int32s("tokenizer.ggml.token_type", kinds),
            gguf_bytes.strings("tokenizer.ggml.merges", ()),
            gguf_bytes.uint32("tokenizer.ggml.bos_token_id", _BOS),
            gguf_bytes.uint32("tokenizer.ggml.eos_token_id", _EOS),
            gguf_bytes.boolean("tokenizer.ggml.add_bos_token", True),
        )
    )


def _tokens(n_vocab: int, words: Words) -> Iterator[bytes]:
    yield from (letter.encode() for letter in _letters_of_bytes())
    yield from (b"<s>", b"</s>")
    yield from (_word(i).encode() for i in range(words.stop - words.start))
    yield from (b"[PAD%d]" % i for i in range(words.stop, n_vocab))


def _word(number: int) -> str:
    n = len(_SYLLABLES)
    syllables = (_SYLLABLES[place % n] for place in (number, number // n, number // n**2))
    return "Ġ" + "".join(syllables)  # Ġ: a space


def _letters_of_bytes() -> Iterator[str]:
    """Each byte as a letter that can be seen, as the vocabulary of GPT-2 writes them."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    n_others = 0
    for byte in range(256):
        if byte in seen:
            yield chr(byte)
        else:
            yield chr(256 + n_others)
            n_others += 1
