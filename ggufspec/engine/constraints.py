"""What a request lets be written, by the tokens of a vocabulary: biases, breakers, grammars."""

from __future__ import annotations

import math
from dataclasses import replace

from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import OptionError
from ggufspec.llama.grammar import Grammar
from ggufspec.llama.vocab import Vocab
from ggufspec.structured.json_schema import gbnf_of_schema


def sampling_of(options: CheckedOptions, vocab: Vocab, n_prompt: int) -> Sampling:
    """The sampling of a request behind `n_prompt` tokens, with what only the vocabulary knows.

    Raises OptionError.
    """
    sampling = options.sampling
    for token in sampling.logit_bias:
        if not 0 <= token < vocab.n_tokens:
            raise OptionError(
                f"logit_bias names token {token}; the vocabulary has {vocab.n_tokens:,}"
            )
    if options.ignore_eos:
        banned = dict.fromkeys(vocab.stop_tokens, -math.inf)
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **banned})
    if sampling.dry_multiplier > 0:
        breakers = vocab.sequence_breakers(tuple(options.dry_sequence_breakers))
        sampling = replace(sampling, dry_breakers=breakers)
    gbnf = options.grammar
    if options.json_schema is not None:
        gbnf = gbnf_of_schema(options.json_schema)
    if gbnf is None:
        return sampling
    if not vocab.stop_tokens:
        raise OptionError(
            "this vocabulary has no token that ends a text, so that none could be complete by "
            "a grammar; use a model that has one"
        )
    grammar = Grammar(vocab, gbnf)
    grammar.begin(n_prompt)
    if not grammar.names_tokens:
        # They show nothing, so nothing that a grammar asks for is written by them.
        silent = dict.fromkeys(vocab.control_tokens, -math.inf)
        sampling = replace(sampling, logit_bias={**silent, **sampling.logit_bias})
    return replace(sampling, grammar=grammar.native)
