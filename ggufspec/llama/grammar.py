"""Which tokens of a vocabulary may follow a text, by a grammar in GBNF.

The parser states of a text are kept here, so a caller may go back, branch or start over freely.
Three limits come from llama.cpp: it matches control tokens by their names, it accepts overlong
UTF-8, and an ambiguous grammar may keep any number of parses of a text.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import llama_cpp

from ggufspec import _native
from ggufspec.errors import ModelError, OptionError
from ggufspec.llama.devices import address_of, addresses
from ggufspec.llama.log import listening
from ggufspec.llama.vocab import Vocab
from ggufspec.structured import gbnf as notation

_DATA_FIELDS = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]
_ARRAY_FIELDS = ["data", "size", "selected", "sorted"]
FUNCTIONS = (  # called by the extension
    "llama_sampler_accept",
    "llama_sampler_apply",
    "llama_sampler_clone",
    "llama_sampler_free",
    "llama_vocab_is_eog",
)


class Grammar:
    """A grammar over the tokens of a vocabulary; valid as long as the vocabulary's model is.

    Not for two threads at once: `native` holds the states of one text.
    """

    def __init__(self, vocab: Vocab, gbnf: str) -> None:
        """`gbnf`: rules; `root` matches the whole text.

        Raises OptionError, with line and column, for a grammar that cannot be used.
        """

        self.names_tokens = False  # whether it has token literals, beside characters

        def is_token(name: str) -> bool:
            self.names_tokens = True
            if name.startswith("<["):
                return len(name) < 15 and int(name[2:-2]) < vocab.n_tokens
            return len(vocab.tokenize(name, add_special=False, parse_special=True)) == 1

        notation.check(gbnf, is_token)
        with listening() as log:
            start = llama_cpp.llama_sampler_init_grammar(
                vocab.pointer, gbnf.encode("utf-8"), notation.ROOT.encode()
            )
            if not start:
                raise OptionError(
                    "llama.cpp rejects the grammar; if it reports left recursion, do not repeat "
                    f"what may be empty, such as (a?)*.\n{log.complaints()}"
                )
        self.native = _native.Grammar(
            address_of(start), vocab.pointer, vocab.n_tokens, **_addresses()
        )

    def begin(self, n_start: int) -> None:
        """Begin a new text after `n_start` tokens of prompt, which the grammar does not concern."""
        self.native.begin(n_start)

    def allowed(self, tokens: Sequence[int], candidates: Sequence[int]) -> list[bool] | None:
        """Whether each of `candidates` may follow `tokens`, which include the prompt.

        None if nothing may: the text violates the grammar, or a token has ended it. Raises
        ValueError for ids outside the vocabulary, and for fewer tokens than `begin` was given.
        """
        return self.native.allowed(_ids(tokens), _ids(candidates))  # type: ignore[arg-type]


def _ids(tokens: Sequence[int]) -> array[int]:
    try:
        return array("i", tokens)
    except OverflowError as error:
        raise ValueError(f"a token is outside the vocabulary: {error}") from error


def _addresses() -> dict[str, int]:
    found = [name for name, _ in llama_cpp.llama_token_data_array._fields_]
    if llama_cpp.llama_token_data._fields_ != _DATA_FIELDS or found != _ARRAY_FIELDS:
        raise ModelError(
            "this llama-cpp-python has another llama_token_data or llama_token_data_array than "
            "ggufspec was built for; install a version that ggufspec supports"
        )
    return addresses(*FUNCTIONS)
