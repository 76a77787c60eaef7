"""Our attention as an operation of ggml's CPU backend: in double precision, and bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from processes import python

from ggufspec.llama import attention_trials, kernels
from ggufspec.llama.attention_trials import Array, Case, attend, expected
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.standin import embedded

pytestmark = pytest.mark.skipif(
    kernels.unusable() is not None, reason=f"no kernels here: {kernels.unusable()}"
)

N_CELLS, N_TOKENS, D = 203, 17, 64
HIDDEN = -np.inf


def text(n_tokens: int = N_TOKENS, n_cells: int = N_CELLS, n_heads: int = 6) -> Case:
    """The last tokens of a text whose cells lie in order."""
    draw = np.random.default_rng(7)
    keys, values = (draw.standard_normal((1, n_cells, 2, D), np.float32) for _ in range(2))
    queries = draw.standard_normal((1, n_tokens, n_heads, D), np.float32)
    later = np.arange(n_cells) > np.arange(n_cells - n_tokens, n_cells)[:, None]
    return Case(queries, keys, values, np.where(later, HIDDEN, 0)[None])


def part(case: Case, begin: int, end: int) -> Case:
    """A pass over some of its tokens."""
    assert case.mask is not None
    return replace(case, queries=case.queries[:, begin:end], mask=case.mask[:, begin:end])


def moved(case: Case, places: Array, n_cells: int) -> Case:
    """The same text with its cells in these places, among cells of others that it does not see."""
    draw = np.random.default_rng(8)
    keys, values = (
        (9 * draw.standard_normal((1, n_cells, *each.shape[2:]))).astype(np.float32)
        for each in (case.keys, case.values)
    )
    assert case.mask is not None
    mask = np.full((1, case.mask.shape[1], n_cells), HIDDEN)
    keys[:, places], values[:, places], mask[:, :, places] = case.keys, case.values, case.mask
    return replace(case, keys=keys, values=values, mask=mask)


@pytest.mark.parametrize("case", [*attention_trials.cases()])
def test_it_is_double_precision_up_to_rounding(case: Case) -> None:
    wanted = expected(case)
    assert np.abs(attend(case) - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_that_is_closer_than_llama_cpps_attention() -> None:
    wanted = expected(text())
    ours, theirs = (np.abs(attend(text(), is_ours=each) - wanted).max() for each in (True, False))
    assert 0 < 10 * ours < theirs


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 8, N_TOKENS, 60])
@pytest.mark.parametrize("type_", attention_trials.TYPES)
def test_a_row_is_the_same_alone_and_in_pieces_of_a_text(n_tokens: int, type_: str) -> None:
    """60 tokens are so many rows that each thread computes some of them over all cells."""
    whole = replace(text(n_tokens), type_k=type_, type_v=type_)
    found = attend(whole)
    for size in (1, 7):
        bounds = [*range(0, n_tokens, size), n_tokens]
        pieces = [attend(part(whole, *each)) for each in pairwise(bounds)]
        np.testing.assert_array_equal(found, np.concatenate(pieces, 1))


@pytest.mark.parametrize("n_tokens", [1, N_TOKENS, 60])
def test_threads_change_no_bit(n_tokens: int) -> None:
    found = [attend(text(n_tokens), n_threads=n) for n in (1, 2, 3)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("n_tokens", [1, N_TOKENS, 60])
@pytest.mark.parametrize("order", ["later", "apart", "reversed", "shuffled"])
def test_places_of_cells_and_hidden_cells_change_no_bit(n_tokens: int, order: str) -> None:
    case, n_cells = text(n_tokens), 3 * N_CELLS
    places = {
        "later": np.arange(N_CELLS) + 100,
        "apart": 3 * np.arange(N_CELLS) + 1,
        "reversed": np.arange(N_CELLS)[::-1] + 5,
        "shuffled": np.random.default_rng(9).permutation(n_cells)[:N_CELLS],
    }[order]
    np.testing.assert_array_equal(attend(case), attend(moved(case, places, n_cells)))


def test_texts_beside_it_change_no_bit() -> None:
    """Two texts, with cells in turn, in one pass and in passes of their own."""
    first, second = text(4), replace(text(4), queries=-text(4).queries)
    places = 2 * np.arange(N_CELLS), 2 * np.arange(N_CELLS) + 1
    masks = []
    keys, values = (np.zeros((1, 2 * N_CELLS, 2, D), np.float32) for _ in range(2))
    for case, at in zip((first, second), places, strict=True):
        keys[:, at], values[:, at] = case.keys, case.values
        assert case.mask is not None
        mask = np.full((1, 4, 2 * N_CELLS), HIDDEN)
        mask[:, :, at] = case.mask
        masks.append(mask)
    queries = np.concatenate((first.queries, second.queries), 1)
    both = attend(Case(queries, keys, values, np.concatenate(masks, 1)))
    np.testing.assert_array_equal(both, np.concatenate((attend(first), attend(second)), 1))


@pytest.mark.parametrize("size", [1e-6, 1.0, 6e4])
def test_places_change_no_bit_for_values_of_any_size(size: float) -> None:
    """With one cell that has nearly all of the weight, as the first one of a text often has."""
    case = text(3)
    keys = 0.1 * case.keys
    keys[:, 0] = 4 * case.queries[:, 0, ::3]
    values = size * np.clip(case.values / 4, -1, 1)
    values[:, 0] /= 1000
    case = replace(case, keys=keys, values=values)
    places = np.random.default_rng(3).permutation(2 * N_CELLS)[:N_CELLS]
    found = attend(case)
    np.testing.assert_array_equal(found, attend(moved(case, places, 2 * N_CELLS)))
    wanted = expected(case)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("n_tokens", [2, 60])
def test_cells_that_are_not_finite_spoil_only_the_rows_that_see_them(
    wrong: float, n_tokens: int
) -> None:
    case = text(n_tokens)
    last = N_CELLS - 1  # which only the last token sees
    for name in ("keys", "values"):
        cells = getattr(case, name).copy()
        cells[:, last] = wrong
        found = attend(replace(case, **{name: cells}))
        assert np.isnan(found[:, -1]).all()
        np.testing.assert_array_equal(found[:, :-1], attend(case)[:, :-1])


def test_a_row_without_visible_cells_is_zero() -> None:
    case = text(3)
    assert case.mask is not None
    mask = case.mask.copy()
    mask[:, 1] = HIDDEN
    assert not attend(replace(case, mask=mask))[:, 1].any()


def test_what_has_no_code_is_computed_by_llama_cpp() -> None:
    case = replace(text(2), queries=text(2).queries[..., :40], keys=text(2).keys[..., :40])
    theirs = attend(case, is_ours=False)
    np.testing.assert_array_equal(attend(case), theirs)
    assert (attend(text(2)) != attend(text(2), is_ours=False)).any()


@pytest.mark.parametrize(("spoils", "outcome"), [("", "works"), ("keys", "wrong")])
def test_the_trial_finds_attention_that_computes_something_else(spoils: str, outcome: str) -> None:
    program = f"from ggufspec.llama import attention_trials as of; of.try_attention({spoils!r})"
    assert python(program)[-1] == outcome


def logits(model: Model, way: str, size: int, n_threads: int = 1) -> Array:
    """Of 40 tokens in passes of this size."""
    context = Context(
        model, ContextOptions(n_ctx=64, n_rows=40, n_threads=n_threads, flash_attention=way)
    )
    found = []
    for i in range(0, 40, size):
        n = min(size, 40 - i)
        context.decode([*range(20 + i, 20 + i + n)], n)
        found.append(np.array(context.rows(0, n)))
    context.close()
    return np.concatenate(found)


def test_a_context_computes_with_the_attention_that_it_is_made_for() -> None:
    """Contexts of both kinds in turn; llama.cpp's attention is not as exact."""
    model = Model(embedded.embedded_target())
    own, on, again = (logits(model, way, 40) for way in ("own", "on", "own"))
    np.testing.assert_array_equal(own, again)
    assert 0 < np.abs(own - on).max() < 0.2 * on.std()
    model.close()
