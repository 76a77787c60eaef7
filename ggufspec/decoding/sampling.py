"""From logits to distributions to tokens; random numbers are arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggufspec import _native
from ggufspec.decoding.sampling_options import Sampling as Sampling
from ggufspec.decoding.tree import leaves, path_to
from ggufspec.decoding.types import Logits, Masks, Probs, token_array
from ggufspec.errors import ConstraintError, DecodeError

Rows = _native.Rows  # distributions in the extension; numpy.asarray(rows) is (n, n_vocab)


def to_probs(
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    draft: Sequence[int] = (),
    parents: Sequence[int] = (),
    *,
    out: Rows | None = None,
) -> Rows:
    """The distributions (n_draft + 1, n_vocab) after `tokens`, then after each token of `draft`.

    `parents`: the draft is a tree, see Draft. `out`: reused for the result. Rows are evaluated when
    they are read, from `logits` without a copy: they are valid as long as `logits` is.
    Raises DecodeError for a row without any finite logit: damaged weights or a broken backend.
    """
    rows = Rows(len(logits), logits.shape[1]) if out is None else out
    try:
        masks = _masks(sampling, tokens, draft, parents)
        rows.fill(logits, sampling.native, token_array(tokens), draft, parents, masks)  # type: ignore[arg-type]
    except ValueError as error:
        raise unusable(str(error), sampling, logits) from error
    return rows


def draw(
    rows: Rows,
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int],
    policy: _native.LengthPolicy | None,
    uniform: float,
) -> int:
    """Add the distribution of logits (1, n_vocab) after `tokens`, and draw a token from it.

    Returns -1, and adds no row, if `policy` ends the draft. Raises as to_probs does.
    """
    try:
        masks = _masks(sampling, tokens)
        return rows.draw(logits, sampling.native, token_array(tokens), masks, policy, uniform)  # type: ignore[arg-type]
    except ValueError as error:
        raise unusable(str(error), sampling, logits) from error


def as_rows(probs: Probs) -> Rows:
    """The distributions as Rows; the rows of an array are normalised."""
    if isinstance(probs, Rows):
        return probs
    weights = np.ascontiguousarray(probs, np.float32)
    rows = Rows(len(weights), weights.shape[1])
    rows.append_weights(weights)
    return rows


def _masks(
    sampling: Sampling,
    tokens: Sequence[int],
    draft: Sequence[int] = (),
    parents: Sequence[int] = (),
) -> Masks | None:
    constraint = sampling.constraint
    if constraint is None or constraint.n_free(tokens) > len(draft):
        return None
    if not parents:
        return constraint.masks(tokens, draft)
    found = np.zeros((len(draft) + 1, 0), np.uint32)
    for leaf in leaves(parents):
        path = path_to(parents, leaf)
        masks = constraint.masks(tokens, [draft[node] for node in path])
        if not found.size:
            found = np.zeros((len(draft) + 1, masks.shape[1]), np.uint32)
        found[[0, *(node + 1 for node in path)]] = masks
    return found


def unusable(complaint: str, sampling: Sampling, logits: Logits | None = None) -> DecodeError:
    """The error for rows from which no token can be drawn; `logits`: of these rows.

    A ConstraintError where the sampling bans all tokens that the model allows.
    """
    is_damaged = logits is not None and not np.isfinite(logits[:1]).any()
    if sampling.constraint is not None and not is_damaged:
        return ConstraintError(
            f"the text cannot continue ({complaint}): the grammar or schema is too complex, or "
            "requires what no token of this vocabulary has, or what logit_bias or banned_strings "
            "ban; change it"
        )
    has_bans = sampling.state is not None and sampling.state.has_bans
    if (sampling.logit_bias or has_bans) and not is_damaged:
        return ConstraintError(
            f"no token can be drawn ({complaint}): logit_bias, ignore_eos or banned_strings ban "
            "every token that the model allows; ban fewer"
        )
    return DecodeError(
        f"the model's output cannot be sampled ({complaint}); "
        "the file may be damaged, or its type unsupported on this device"
    )
