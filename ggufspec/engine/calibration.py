"""Measures what passes of a pair cost, so that texts with equal seeds draft equally."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ggufspec.common.progress import NamedProgress
from ggufspec.drafting.pair_profile import PairProfile
from ggufspec.engine.pair import Pair
from ggufspec.llama.context import Context
from ggufspec.llama.threadpool import end_threads
from ggufspec.llama.timing import measured
from ggufspec.llama.vocab_map import VocabMap

SIZES = (1, 2, 3, 4, 6, 8, 12, 17, 33, 65)  # tokens of the passes that are measured


def calibrate(pair: Pair, progress: NamedProgress | None = None) -> None:
    """Measure the pair, unless its profile is already settled; seeds then repeat their texts.

    `progress` is called with ("costs", done, total). Raises DecodeError, ClosedError.
    """
    heard = pair.lock.callback(progress)
    with pair.lock.held():
        _measure(pair, pair.profile, pair.target, pair.draft, pair.vocab_map, heard)


def calibrate_draft(pair: Pair) -> None:
    """Measure the draft with its own draft as `calibrate` measures the pair."""
    below, map_below = pair.draft_of_draft or (None, None)
    assert pair.draft is not None
    with pair.lock.held():
        _measure(pair, pair.profile_of_draft, pair.draft, below, map_below)


def calibrate_all(pair: Pair, progress: NamedProgress | None = None) -> None:
    """Measure the pair, and the draft with its own draft; `progress`: see calibrate."""
    calibrate(pair, progress)
    if pair.draft is not None and pair.head is None:
        calibrate_draft(pair)


def settle(pair: Pair, known: Mapping[str, object] | None = None) -> dict[str, object]:
    """Begin all texts with a seed from one profile from now on, also at temperature 0.

    `known`: the return value of another engine's `settle`; None: this engine's profile, measured
    now if it was not. Engines in several processes then write equal texts from equal seeds.
    Returns the profile as JSON data. Raises ValueError where `known` is not such data.
    """
    if known is None:
        calibrate(pair)
        known = pair.profile.to_document()
        if pair.draft_of_draft is not None:
            calibrate_draft(pair)
            known["of_draft"] = pair.profile_of_draft.to_document()
    profile = PairProfile.of_document(known, pair.profile.costs)
    of_draft = known.get("of_draft", {})
    with pair.lock.held():
        pair.profile = profile
        if pair.draft_of_draft is not None:
            assert isinstance(of_draft, Mapping)
            costs = pair.profile_of_draft.costs
            pair.profile_of_draft = PairProfile.of_document(of_draft, costs)
        pair.repeats_greedy_texts = True
    return dict(known)


def _measure(
    pair: Pair,
    profile: PairProfile,
    target: Context,
    draft: Context | None,
    vocab_map: VocabMap | None,
    progress: NamedProgress | None = None,
) -> None:
    if profile.is_settled:  # checked with the lock held: another thread may have measured
        return
    n_most = profile.costs.n_most
    costs = measured(
        target,
        draft,
        [size for size in SIZES if size <= min(n_most, target.n_ctx)],
        progress and partial(progress, "costs"),
        n_most=n_most,
        n_sharers=profile.costs.n_sharers,
        vocab_map=vocab_map,
        sequence=pair.slots.spare(),
    )
    profile.settle(costs)
    end_threads()  # `serve` calibrates in another thread than it writes texts
