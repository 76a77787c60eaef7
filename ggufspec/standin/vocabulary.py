"""The vocabulary of stand-ins: single bytes, begin and end of text, made-up words, and padding."""

from __future__ import annotations

from typing import Any

from ggufspec.models.vocabulary_overlap import letters_of_bytes
from ggufspec.standin.next_token_table import words_of

_BOS, _EOS = 256, 257
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama_token_type
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou")


def vocabulary_values(n_vocab: int) -> dict[str, Any]:
    """The metadata of a tokenizer with that many tokens."""
    words = words_of(n_vocab)
    kinds = [_NORMAL] * words.stop + [_UNUSED] * (n_vocab - words.stop)
    kinds[_BOS] = kinds[_EOS] = _CONTROL
    padding = (b"[PAD%d]" % i for i in range(words.stop, n_vocab))
    letters = map(str.encode, letters_of_bytes())
    tokens = [*letters, b"<s>", b"</s>", *map(_word, range(len(words))), *padding]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": _BOS,
        "tokenizer.ggml.eos_token_id": _EOS,
        "tokenizer.ggml.add_bos_token": True,
    }


def _word(number: int) -> bytes:
    n = len(_SYLLABLES)
    syllables = (_SYLLABLES[place % n] for place in (number, number // n, number // n**2))
    return ("Ġ" + "".join(syllables)).encode()  # Ġ: a space
