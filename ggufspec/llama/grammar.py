"""Which tokens may follow a text, by a grammar in llama.cpp's notation (GBNF).

Knows the vocabulary of one model; decides nothing about logits or draws. Where in the grammar a
text stands is a private memo of it: going back, branching and starting over need no call.
What llama.cpp itself blurs stays blurred: it matches control tokens by their names, and takes
characters in more bytes than they need. Nor can it be bounded how many readings of a text an
ambiguous grammar keeps.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache

import llama_cpp

from ggufspec import _native
from ggufspec.errors import ModelError, OptionError
from ggufspec.llama.log import listening
from ggufspec.llama.vocab import Vocab
from ggufspec.structured import gbnf as notation

_DATA_FIELDS = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]
_ARRAY_FIELDS = ["data", "size", "selected", "sorted"]


class Grammar:
    """A grammar over the tokens of a vocabulary; valid as long as the vocabulary's model is.

    Not for two threads at once: `native` holds the memo of one text.
    """

    def __init__(self, vocab: Vocab, gbnf: str) -> None:
        """`gbnf`: rules, of which `root` is the whole text.

        Raises OptionError, with the place, for a grammar that cannot be used.
        """

        self.names_tokens = False  # whether it asks for tokens, beside characters

        def is_token(name: str) -> bool:
            self.names_tokens = True
            if name.startswith("<["):
                return len(name) < 15 and int(name[2:-2]) < vocab.n_tokens
            return len(vocab.tokenize(name, add_special=False, parse_special=True)) == 1

        notation.check(gbnf, is_token)
        with listening() as heard:
            start = llama_cpp.llama_sampler_init_grammar(
                vocab.pointer, gbnf.encode("utf-8"), notation.ROOT.encode()
            )
            if not start:
                raise OptionError(
                    "llama.cpp does not take the grammar; if it finds left recursion, write no "
                    "repetition of what may be empty, such as (a?)*.\n"
                    f"{heard.complaints()}"
                )
        self.native = _native.Grammar(
            _address_of(start), vocab.pointer, vocab.n_tokens, **_borrowed()
        )

    def begin(self, n_start: int) -> None:
        """A new text begins behind `n_start` tokens, which are the prompt and not under it."""
        self.native.begin(n_start)

    def allowed(self, tokens: Sequence[int], candidates: Sequence[int]) -> list[bool] | None:
        """Whether each of `candidates` may follow `tokens`, the prompt included.

        None where nothing can: the text has left the grammar, or has been ended by a token. Raises
        ValueError for ids outside the vocabulary, and for fewer tokens than `begin` was told.
        """
        return self.native.allowed(_ids(tokens), _ids(candidates))  # type: ignore[arg-type]


def _ids(tokens: Sequence[int]) -> array[int]:
    try:
        return array("i", tokens)
    except OverflowError as error:
        raise ValueError(f"a token is outside the vocabulary: {error}") from error


@cache
def _borrowed() -> dict[str, int]:
    """Addresses of what the extension calls itself, in the libllama that is loaded already."""
    found = [name for name, _ in llama_cpp.llama_token_data_array._fields_]
    if llama_cpp.llama_token_data._fields_ != _DATA_FIELDS or found != _ARRAY_FIELDS:
        raise ModelError(
            "this llama-cpp-python has another llama_token_data or llama_token_data_array than "
            "ggufspec was built for; install a version that ggufspec names"
        )
    library = llama_cpp.llama_cpp._lib
    return {
        name: _address_of(getattr(library, name))
        for name in (
            "llama_sampler_accept",
            "llama_sampler_apply",
            "llama_sampler_clone",
            "llama_sampler_free",
            "llama_vocab_is_eog",
        )
    }


def _address_of(pointer: object) -> int:
    address = ctypes.cast(pointer, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address
    return address
