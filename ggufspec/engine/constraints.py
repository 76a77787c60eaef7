"""The sampling of one generation: bans, DRY sequence breakers and what may follow, as token ids."""

from __future__ import annotations

import math
from dataclasses import replace

from ggufspec.common.progress import Progress
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import OptionError
from ggufspec.llama.vocab import Vocab
from ggufspec.structured.constraint import GrammarConstraint


def sampling_of(
    options: CheckedOptions, vocab: Vocab, n_prompt: int, progress: Progress | None = None
) -> Sampling:
    """The sampling of options, completed with tokens of `vocab`. Raises OptionError.

    `n_prompt`: tokens before the text, which a constraint does not apply to. The first constraint
    of a vocabulary reads all its tokens; `progress` is called with (done, of).
    """
    sampling = options.sampling
    for token in sampling.logit_bias:
        if not 0 <= token < vocab.n_tokens:
            raise OptionError(
                f"logit_bias names token {token}; the vocabulary has {vocab.n_tokens:,} tokens"
            )
    if options.ignore_eos:
        banned = dict.fromkeys(vocab.stop_tokens, -math.inf)
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **banned})
    if sampling.dry_multiplier > 0:
        breakers = vocab.sequence_breakers(tuple(options.dry_sequence_breakers))
        sampling = replace(sampling, dry_breakers=breakers)
    grammar = options.constraint_grammar
    if grammar is None:
        return sampling
    if not vocab.stop_tokens:
        raise OptionError(
            "this vocabulary has no token that ends a text, so no text could be complete under a "
            "grammar; use a model that has one"
        )
    table = vocab.token_table(progress)
    return replace(sampling, constraint=GrammarConstraint(table, grammar, n_prompt))
