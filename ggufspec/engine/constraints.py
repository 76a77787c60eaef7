"""Turns the sampling options of one generation into token ids: bans, DRY breakers, constraints."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ggufspec.common.progress import Progress
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Constraint, Masks
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.reasoning import ReasoningMarks, with_budget
from ggufspec.errors import OptionError
from ggufspec.llama.vocab import Vocab
from ggufspec.structured.reasoning_budget import ANY, ReasoningBudget


def sampling_of(
    options: CheckedOptions,
    vocab: Vocab,
    n_prompt: int,
    progress: Progress | None = None,
    compiled: Constraint | None = None,
    reasoning: ReasoningMarks | None = None,
) -> Sampling:
    """The sampling of options, completed with tokens of `vocab`. Raises OptionError.

    It has the state of one text. `n_prompt`: tokens before the text, which a constraint does not
    apply to. `compiled`: the constraint of another text with the same options. The first constraint
    of a vocabulary reads all its tokens; `progress` is called with (done, of). `reasoning`: what
    options.reasoning_budget limits; None: nothing.
    """
    sampling = options.sampling.begun(options.seed or 0)
    for name, tokens in (("logit_bias", sampling.logit_bias), ("stop_tokens", options.stop_tokens)):
        for token in tokens:
            if not 0 <= token < vocab.n_tokens:
                raise OptionError(
                    f"{name} names token {token}; the vocabulary has {vocab.n_tokens:,} tokens"
                )
    if options.ignore_eos:
        banned = dict.fromkeys(vocab.stop_tokens, -math.inf)
        sampling = replace(sampling, logit_bias={**sampling.logit_bias, **banned})
    if sampling.dry_multiplier > 0:
        breakers = vocab.sequence_breakers(tuple(options.dry_sequence_breakers))
        sampling = replace(sampling, dry_breakers=breakers)
    constraint = _constraint_of(options, vocab, n_prompt, progress, compiled)
    if reasoning is not None and options.reasoning_budget >= 0:
        constraint = with_budget(constraint, options.reasoning_budget, reasoning, n_prompt, vocab)
    return sampling if constraint is None else replace(sampling, constraint=constraint)


def _constraint_of(
    options: CheckedOptions,
    vocab: Vocab,
    n_prompt: int,
    progress: Progress | None,
    compiled: Constraint | None,
) -> Constraint | None:
    if options.min_tokens:
        banned_first = {*vocab.stop_tokens, *options.stop_tokens}
        return LeastTokens(n_prompt + options.min_tokens, banned_first, vocab.n_tokens)
    grammar = options.constraint_grammar
    if grammar is None:
        return None
    from ggufspec.structured.constraint import GrammarConstraint  # llguidance takes long to import

    if isinstance(compiled, ReasoningBudget):
        compiled = compiled.inner
    if isinstance(compiled, GrammarConstraint):
        return compiled.for_another_text(n_prompt)
    if not vocab.stop_tokens:
        raise OptionError(
            "this vocabulary has no token that ends a text, so no text could be complete under a "
            "grammar; use a model that has one"
        )
    return GrammarConstraint(vocab.token_table(progress), grammar, n_prompt)


class LeastTokens:
    """A constraint that bans some tokens while prompt and text have less than `n_least` tokens."""

    def __init__(self, n_least: int, banned: Collection[int], n_vocab: int) -> None:
        self._n_least = n_least
        self._all = np.full(-(-n_vocab // 32), 0xFFFFFFFF, np.uint32)
        self._others = self._all.copy()
        self._banned = frozenset(banned)
        for token in banned:
            self._others[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Masks:
        """Which tokens may follow: see decoding.types.Constraint."""
        lengths = range(len(tokens), len(tokens) + len(draft) + 1)
        return np.stack([self._others if n < self._n_least else self._all for n in lengths])

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        first = draft[: max(self._n_least - len(tokens), 0)]
        return next((i for i, token in enumerate(first) if token in self._banned), len(draft))

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """None: there is always a choice."""
        return ()

    def n_free(self, tokens: Sequence[int]) -> int:
        return ANY if len(tokens) >= self._n_least else 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Never: the model ends the text."""
        return False
