"""Wrong arguments of the extension raise an error: they never read memory that is not theirs.

Worth most under AddressSanitizer: see .ci/sanitize.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggufspec import _native
from ggufspec.decoding.sampling import to_probs
from ggufspec.decoding.sampling_options import Sampling
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import LengthPolicy

N_VOCAB = 200
PRIORS = [(1, 0.5, 0.5, 0.5, 0.5)]


def logits(n_rows: int, n_vocab: int = N_VOCAB) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(n_rows * n_vocab, dtype=np.float32).reshape(n_rows, n_vocab) % 7


def tokens(*found: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(found, np.int32)


def filled(n_rows: int = 2) -> _native.Rows:
    return to_probs(logits(n_rows), Sampling(), array("i"), [1] * (n_rows - 1))


def drawn_from(rows: _native.Rows, given: Any, policy: LengthPolicy) -> int:
    return rows.draw(given, Sampling().native, tokens(), None, policy, 0.5)


def ngrams(**given: Any) -> _native.Ngrams:
    options: dict[str, Any] = {"priors": PRIORS, "prior_weight": 1}
    return _native.Ngrams(**{**options, **given})


def product(n_weights: int, n_columns: int) -> object:
    name = _native.kernel_instructions()[0]
    kind = _native.kernel_types(name)["q4_0"]
    return _native.kernel_product(
        name, kind, np.zeros(n_weights, np.uint8), np.zeros((1, n_columns), np.float32)
    )


NATIVE, POLICY = Sampling().native, LengthPolicy()
WRONG: dict[str, Callable[[], object]] = {
    "no rows": lambda: _native.gap_of(logits(0)),
    "rows of nothing": lambda: _native.Rows(1, 0),
    "one dimension": lambda: _native.gap_of(logits(1)[0]),  # type: ignore[arg-type]
    "float64": lambda: _native.gap_of(logits(1).astype(np.float64)),  # type: ignore[arg-type]
    "not contiguous": lambda: _native.gap_of(logits(2, 400)[:, ::2]),
    "other width": lambda: filled().fill(logits(1, 99), NATIVE, tokens(), [], [], None),
    "more rows than room": lambda: filled().fill(logits(3), NATIVE, tokens(), [1, 2], [], None),
    "more rows than tokens": lambda: filled().fill(logits(2), NATIVE, tokens(), [], [], None),
    "masks of other rows": lambda: filled().fill(
        logits(1), NATIVE, tokens(), [], [], np.zeros((2, 7), np.uint32)
    ),
    "an empty mask": lambda: filled().fill(
        logits(1), NATIVE, tokens(), [], [], np.zeros((1, 0), np.uint32)
    ),
    "NaN rows": lambda: filled().fill(logits(1) * np.nan, NATIVE, tokens(), [], [], None),
    "infinite rows": lambda: filled().fill(logits(1) + np.inf, NATIVE, tokens(), [], [], None),
    "an id too large": lambda: filled().fill(logits(2), NATIVE, tokens(), [N_VOCAB], [], None),
    "a negative id": lambda: filled().append_certain(-1),
    "a bias beyond": lambda: filled().fill(
        logits(1), Sampling(logit_bias={N_VOCAB: 1.0}).native, tokens(), [], [], None
    ),
    "a parent that is no node": lambda: filled(3).fill(
        logits(3), NATIVE, tokens(), [1, 2], [-1, 1], None
    ),
    "to draw from no row": lambda: drawn_from(_native.Rows(2, N_VOCAB), logits(0), POLICY),
    "to draw from two rows": lambda: drawn_from(_native.Rows(2, N_VOCAB), logits(2), POLICY),
    "no row was declined": lambda: filled().draw_declined(POLICY, 0.5),
    "a policy that has seen no row": lambda: declined().draw_declined(LengthPolicy(), 0.5),
    "to decline no row": lambda: _native.Rows(1, N_VOCAB).decline(),
    "more weights than room": lambda: filled().append_weights(logits(1) + 1),
    "weights without weight": lambda: _native.Rows(1, N_VOCAB).append_weights(logits(1) * 0),
    "no such row": lambda: filled().pick(2, 0.5),
    "the last row's last token": lambda: filled().of(1, N_VOCAB),
    "a row of no rows": lambda: filled().overlap(0, _native.Rows(1, N_VOCAB), 0),
    "a declined row of before": lambda: refilled().overlap(0, refilled(), 1),
    "fewer uniforms": lambda: _native.match([1], [], None, filled(), [0.5]),
    "more tokens than rows": lambda: _native.rejection([1, 2], [], None, filled(), [0.5] * 3),
    "a draft of other width": lambda: _native.traversal(
        [1], [], _native.Rows(1, 9), filled(), [0.5] * 2
    ),
    "a token of no vocabulary": lambda: _native.match([-1], [], None, filled(), [0.5] * 2),
    "a node before its parent": lambda: _native.match([1], [0], None, filled(), [0.5] * 2),
    "a tree of other size": lambda: _native.match([1], [-1, 0], None, filled(), [0.5] * 2),
    "None among the texts": lambda: ngrams(others=[None]),
    "priors that begin at 2": lambda: ngrams(priors=[(2, 0.5, 0.5, 0.5, 0.5)]),
    "no priors": lambda: ngrams(priors=[]),
    "more observed than predicted": lambda: ngrams().observe(0, 1),
    "more accepted than tried": lambda: ngrams().observe(1, 0),
    "no costs": lambda: _native.best_rule([], 1.0, [0.5]),
    "a pass over no token": lambda: CostModel(0),
    "a round with nothing to read": lambda: LengthPolicy().start_round(1, 0),
    "weights that are no rows": lambda: product(17, 32),
    "columns that are no blocks": lambda: product(18, 31),
    "no columns": lambda: product(18, 0),
    "a null address": lambda: _native.rows_at(0, 1, 1),
}


def declined() -> _native.Rows:
    rows = filled()
    rows.decline()
    return rows


def refilled() -> _native.Rows:
    """The row that was declined is that of logits which are no more."""
    rows = declined()
    return to_probs(logits(1), Sampling(), out=rows)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises(name: str) -> None:
    if "kernel" in WRONG[name].__code__.co_names and not _native.kernel_instructions():
        pytest.skip("this processor has no kernels")
    with pytest.raises((ValueError, TypeError)):
        WRONG[name]()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", _native.kernel_instructions())
def test_products_of_activations_that_are_no_numbers(name: str, value: float) -> None:
    for kind in _native.kernel_types(name).values():
        for n_bytes in range(2, 1024):  # of a row of 256 columns: those of the type are not public
            weights = np.full(n_bytes, 0x3C, np.uint8)
            rows = np.full((1, 256), value, np.float32)
            try:
                assert _native.kernel_product(name, kind, weights, rows).shape[0] == 1
                break
            except ValueError:
                continue


@pytest.mark.parametrize("order", [("temperature", "typical_p"), ("temperature", "top_k")])
def test_a_temperature_at_which_logits_overflow_is_greedy(order: tuple[str, ...]) -> None:
    sampling = Sampling(temperature=1e-38, typical_p=0.5, top_k=150, samplers=order)
    mask = np.full((1, (N_VOCAB + 31) // 32), 0xFFFFFFFF, np.uint32)
    rows = _native.Rows(1, N_VOCAB)
    for masks in (None, mask):
        rows.fill(logits(1), sampling.native, tokens(), [], [], masks)
        assert rows.of(0, int(logits(1).argmax())) == 1
