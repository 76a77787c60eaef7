"""Finds the reasoning of an answer by the marks of its chat template, and limits its length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ggufspec.decoding.types import Constraint
from ggufspec.engine.answer_syntax import Syntax, syntax_of
from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.errors import OptionError
from ggufspec.llama.vocab import Vocab
from ggufspec.structured.reasoning_budget import ReasoningBudget, TokenMarks

_HARMONY_HEADER = "<|start|>assistant"
_N_TAIL = 512  # last tokens of a prompt, which may contain the beginning of an answer


class ReasoningMarks(NamedTuple):
    """The marks of the reasoning before an answer, and whether the prompt has opened it."""

    begin: str
    end: str
    is_open: bool


def begun_answer(syntax: Syntax, prompt: str) -> str:
    header = syntax.header
    return prompt.rpartition(header)[2] if header and header in prompt else ""


def begun_in(syntax: Syntax, prompt: Sequence[int], vocab: Vocab) -> str:
    tail = b"".join(map(vocab.shown, prompt[-_N_TAIL:]))
    return begun_answer(syntax, tail.decode("utf-8", "replace"))


def reasoning_after(syntax: Syntax, begun: str) -> ReasoningMarks | None:
    """The reasoning that may follow `begun`; None: none may follow."""
    if syntax.reasoning is None:
        return None
    begin, end = syntax.reasoning
    opened, closed = begun.rfind(begin) if begin else -1, begun.rfind(end)
    if closed > opened or (opened < 0 and begun.strip()):
        return None
    if syntax.is_harmony:
        end += _HARMONY_HEADER
    return ReasoningMarks(begin, end, opened >= 0) if begin else None


def reasoning_of(
    template: ChatTemplate, prompt: Sequence[int], vocab: Vocab
) -> ReasoningMarks | None:
    """The reasoning that may follow a prompt of token ids; None: none may follow."""
    syntax = syntax_of(template)
    return reasoning_after(syntax, begun_in(syntax, prompt, vocab))


def with_budget(
    constraint: Constraint | None, n_most: int, marks: ReasoningMarks, n_prompt: int, vocab: Vocab
) -> ReasoningBudget:
    """The constraint of a text whose reasoning has at most `n_most` tokens. Raises OptionError."""
    specials = vocab.specials_in(f"{marks.begin} {marks.end}")
    by_token = {token: b"\xff%d\xff" % token for token in specials.values()}  # no text has it

    def piece(token: int) -> bytes:
        return by_token.get(token) or vocab.piece(token)

    begin, end = (_tokens_of(mark, specials, vocab) for mark in (marks.begin, marks.end))
    texts = [b"".join(map(piece, tokens)).strip() for tokens in (begin, end)]
    if not all(texts):
        raise OptionError(
            f"reasoning_budget needs tokens for {marks.begin!r} and {marks.end!r}, the marks of "
            "reasoning in the chat template; this vocabulary cannot write them: leave it out"
        )
    token_marks = TokenMarks(texts[0], texts[1], tuple(end), piece)
    return ReasoningBudget(
        token_marks, n_most, n_prompt, vocab.n_tokens, constraint, is_open=marks.is_open
    )


def _tokens_of(mark: str, specials: dict[str, int], vocab: Vocab) -> list[int]:
    names = "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"\Z"
    found: list[int] = []
    for part in filter(None, re.split(f"({names})", mark)):
        token = specials.get(part)
        found += vocab.tokenize_inside(part) if token is None else [token]
    return found
