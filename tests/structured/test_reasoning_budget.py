"""A reasoning budget forces the end mark where the reasoning has its tokens, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from ggufspec.decoding.types import Constraint
from ggufspec.structured import grammar
from ggufspec.structured.constraint import GrammarConstraint, TokenTable
from ggufspec.structured.reasoning_budget import ReasoningBudget, TokenMarks

BEGIN, END = "<think>", "</think>"
PIECES = [bytes([i]) for i in range(256)] + [b"</", b"think", b"k>\n", "é".encode(), b"<end>"]
OPEN, CLOSE, WORD, BREAK, CHAR, STOP = (*range(256, 260), 259, 260)
USUAL = (256, 257, ord(">"))  # </ think >


def tokens(text: str) -> list[int]:
    return [*text.encode()]


def budget_of(
    n_most: int, *, is_open: bool = True, inner: Constraint | None = None
) -> ReasoningBudget:
    marks = TokenMarks(BEGIN.encode(), END.encode(), USUAL, PIECES.__getitem__)
    return ReasoningBudget(marks, n_most, 0, len(PIECES), inner, is_open=is_open)


def forced_at(budget: ReasoningBudget, text: Sequence[int]) -> dict[int, int]:
    """The places in a text at which one token alone is allowed, and that token."""
    found = {}
    rows = budget.masks(text[:0], text)
    for place, row in enumerate(rows):
        allowed = [i for i in range(len(PIECES)) if row[i // 32] >> (i % 32) & 1]
        if len(allowed) == 1:
            found[place] = allowed[0]
            assert budget.n_free(text[:place]) == 0
        else:
            assert len(allowed) == len(PIECES)
        assert [*budget.forced(text[:place])][:1] == (allowed if len(allowed) == 1 else [])
    return found


@pytest.mark.parametrize("n_most", [0, 1, 5])
def test_the_end_is_forced_after_the_budget_token_by_token(n_most: int) -> None:
    text = [*tokens("abcde"[:n_most]), *USUAL, *tokens("\n\nok <think>more")]
    budget = budget_of(n_most)
    assert forced_at(budget, text) == {n_most + i: token for i, token in enumerate(USUAL)}
    assert budget.n_allowed([], text) == len(text)
    assert budget.n_allowed([], [*text[:n_most], ord("x")]) == n_most
    assert [budget.n_free(text[:n]) for n in range(n_most)] == [*range(n_most, 0, -1)]
    assert budget.n_free(text) > 10**6


def test_any_text_may_be_asked_after_any_other() -> None:
    budget = budget_of(3)
    for text, forced in (("abc", USUAL), ("a", ()), ("axy", USUAL), ("a</think>bcd", ())):
        assert tuple(budget.forced(tokens(text))) == forced


@pytest.mark.parametrize("begin", ["<think>", "\n <think>", "<think>x</think>\n<think>"])
def test_reasoning_that_the_model_opens_counts_from_its_mark(begin: str) -> None:
    budget, n = budget_of(12, is_open=False), 12 - len("x</think>") * begin.count("x")
    text = [*tokens(begin), *tokens("abcdefghijkl"[:n])]
    assert forced_at(budget, text) == {len(text): USUAL[0]}
    assert budget.n_free([]) == 13  # the mark takes a token at least


@pytest.mark.parametrize("text", ["I <think>abcdef", "<thinker>abcdef", "<thin", "", " \n"])
def test_a_text_without_reasoning_is_free(text: str) -> None:
    assert forced_at(budget_of(2, is_open=False), tokens(text)) == {}


def test_an_end_that_the_model_has_begun_is_completed() -> None:
    begun = [*tokens("ab"), *USUAL[:2]]
    assert forced_at(budget_of(4), begun) == {4: USUAL[2]}
    assert forced_at(budget_of(3), begun) == {3: USUAL[1], 4: USUAL[2]}
    # In other tokens than the usual ones, the whole mark follows.
    assert [*budget_of(4).forced(tokens("ab</"))] == [*USUAL]


def test_the_end_of_the_model_itself_counts_in_any_tokens() -> None:
    text = [*tokens("ab</thin"), 258, *tokens("abcdefghijklmnop")]
    assert forced_at(budget_of(20), text) == {}
    assert forced_at(budget_of(11), text) == {}
    assert forced_at(budget_of(8), text)[8] == USUAL[0]


def test_a_begun_character_is_completed_first() -> None:
    for character in ("é", "€", "😀"):
        text = tokens("a" + character)
        for n_most in range(2, len(text) + 1):
            assert forced_at(budget_of(n_most), text) == {len(text): USUAL[0]}
    hopeless = [0xF0] * 10  # each begins another character
    assert min(forced_at(budget_of(2), hopeless)) == 5


def table() -> TokenTable:
    return TokenTable(PIECES, special=[STOP], stop_tokens=[STOP], tokenize=lambda _, text: [*text])


def test_what_follows_the_end_is_up_to_the_other_constraint() -> None:
    inner = GrammarConstraint(table(), grammar.of_regex(r"[a-z]{0,9}</think>yes( no)?"), 0)
    budget = budget_of(2, inner=inner)
    assert [*budget.forced([])] == []
    text = [*tokens("ab"), *USUAL]
    assert [*budget.forced(tokens("ab"))] == [*USUAL]
    assert [*budget.forced(text)] == tokens("yes")
    assert budget.n_allowed([], [*text, *tokens("yes no"), STOP]) == len(text) + 7
    assert budget.n_allowed([], tokens("abc")) == 2
    assert budget.n_allowed([], [*text, *tokens("na")]) == len(text)
    assert budget.is_over([*text, *tokens("yes no")])
    assert budget.n_free([]) == budget.n_free(text) == 0
    rows = budget.masks(tokens("a"), [*tokens("b"), *USUAL])
    alone = inner.masks(tokens("a"), [*tokens("b"), *USUAL])
    assert (rows[[0, 4]] == alone[[0, 4]]).all()
    assert [int(row.any()) for row in rows] == [1] * 5


@pytest.mark.parametrize("regex", ["[a-z]{4}", "[a-z</]{4,}", "(a|b|</thin)*"])
def test_where_the_other_constraint_allows_no_end_none_is_forced(regex: str) -> None:
    inner = GrammarConstraint(table(), grammar.of_regex(regex), 0)
    budget = budget_of(2, inner=inner)
    text = tokens("abab")
    assert re.fullmatch(regex, "abab")
    assert budget.n_allowed([], text) == 4
    assert not {256, ord("<")} & {*budget.forced(tokens("ab"))}
    assert (budget.masks([], text) == inner.masks([], text)).all()
