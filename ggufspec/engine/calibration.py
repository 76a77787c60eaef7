"""Measures what passes of a pair cost, so that texts with equal seeds draft equally.

Its functions are called by the engine's thread (Engine.run), while a slot is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from functools import partial
from math import ceil
from time import perf_counter
from typing import NamedTuple

from ggufspec.common import defaults
from ggufspec.common.progress import NamedProgress, Progress
from ggufspec.decoding import verify as rules
from ggufspec.decoding.loop import speculate
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Ask, Round, Scored
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.pair_profile import PairProfile
from ggufspec.drafting.strategies import Materials, make
from ggufspec.engine.pair import Pair
from ggufspec.engine.slots import Slot
from ggufspec.errors import DecodeError
from ggufspec.llama.context import Context
from ggufspec.llama.log import logger
from ggufspec.llama.vocab_map import filler_tokens
from ggufspec.measure import table
from ggufspec.measure.disturbed import Watch, undisturbed
from ggufspec.measure.passes import time_target

PASS_SIZES = (1, 2, 3, 4, 6, 8, 12, 17, 33, 65)  # tokens of the passes that are measured
DEPTH, N_ROUNDS, N_DRAFTED = 32, 5, 3  # of the text whose rounds are measured
N_READ, N_READINGS = 16, 2  # tokens that a draft model reads in one batch
LEAST_DEPTH, MOST_TOKENS = 2, 512  # an EAGLE-3 head needs two tokens to draft from


def calibrate(pair: Pair, progress: NamedProgress | None = None) -> None:
    """Measure the pair, unless its profile is already settled; seeds then repeat their texts.

    Beside busy programs, this ends early: texts with a seed in this engine then start from the
    costs known so far (of a new pair: assumed ones), and nothing is stored.
    `progress` is called with ("costs" or "draft costs", done, total). Raises DecodeError,
    ClosedError.
    """
    _measure(pair, pair.profile, pair.target, progress)


def calibrate_draft(pair: Pair, progress: NamedProgress | None = None) -> None:
    """Measure the draft's passes, which staged drafts depend on, as `calibrate` does the pair's."""
    assert pair.draft is not None
    _measure(pair, pair.profile_of_draft, pair.draft, progress)


def calibrate_all(pair: Pair, progress: NamedProgress | None = None) -> None:
    """Measure the pair, and the passes of its draft; `progress`: see calibrate."""
    calibrate(pair, progress)
    if pair.draft is not None and pair.head is None:
        calibrate_draft(pair, progress)


def settle(
    pair: Pair,
    known: Mapping[str, object] | None = None,
    progress: NamedProgress | None = None,
) -> dict[str, object]:
    """Begin all texts with a seed from one profile from now on, also at temperature 0.

    `known`: the return value of another engine's `settle`; None: this engine's profile, measured
    now if it was not (`progress`: see calibrate). Engines in several processes then write equal
    texts from equal seeds.
    Returns the profile as JSON data. Raises ValueError where `known` is not such data.
    """
    if known is None:
        calibrate(pair, progress)
        known = pair.profile.to_document()
    profile = PairProfile.of_document(known, pair.profile.costs)
    pair.profile = profile
    pair.repeats_greedy_texts = True
    return dict(known)


def _measure(
    pair: Pair,
    profile: PairProfile,
    context: Context,
    progress: NamedProgress | None,
) -> None:
    """Settle the profile of `context`: see calibrate and _costs."""
    if profile.is_settled:
        return
    slot = spare_slot(pair)
    costs = undisturbed(
        lambda watch: _costs(pair, slot, profile.costs, context, watch, progress), context.n_threads
    )
    if costs is None:
        logger.warning(
            "ggufspec: other programs use the processor, so costs of drafting are not measured: "
            "texts with a seed start from those known so far, and a later load measures them"
        )
    slot.forget()
    profile.settle(costs or profile.costs.as_measured(), is_disturbed=costs is None)


def _costs(
    pair: Pair,
    slot: Slot,
    known: CostModel,
    context: Context,
    watch: Watch,
    progress: NamedProgress | None,
) -> CostModel:
    """Measure `context`, which is the target's or the draft's.

    Passes of many sizes first; for the target also rounds of a text, as a drafter runs them.
    """

    def tell(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(what, done, total)
        watch.check()

    of_draft = partial(tell, "draft costs")
    of_passes = partial(tell, "costs") if context is pair.target else of_draft
    of_passes(0, 1)
    costs = CostModel(known.n_most, known.n_sharers, n_per_step=known.n_per_step)
    sizes = [size for size in PASS_SIZES if size <= min(known.n_most, context.n_ctx)]
    at = slot.target.sequence
    timed = time_target(context, sizes, depth=DEPTH, n_repeats=2, progress=of_passes, sequence=at)
    fewest = {size: min(seconds) for size, seconds in timed.items()}
    for size, seconds in fewest.items():
        costs.observe_target(size, seconds)
    watch.end()
    if pair.stored_profile.facts is not None:
        table.add(table.key_in(context), table.rows_in(context, fewest, DEPTH))
    if slot.draft is not None and context is pair.target:
        for found in time_drafts(pair, slot, DEPTH, N_ROUNDS, of_draft):
            if found:
                fastest = min(found, key=lambda each: each.per_step)  # others may be disturbed
                costs.observe_draft(fastest.n, fastest.seconds, fastest.n_further)
    watch.end()
    return costs


def spare_slot(pair: Pair) -> Slot:
    """The slot to measure in; a head, if there is one, reads the states of its text."""
    slot = pair.slots.spare()
    if pair.head is not None:
        pair.head.use(slot.target.sequence, is_used=True)
    return slot


class Drafted(NamedTuple):
    """`n` draft steps in sequence, the first of which also read `n_further` tokens."""

    seconds: float
    n: int
    n_further: int

    @property
    def per_step(self) -> float:
        return self.seconds / self.n


def time_drafts(
    pair: Pair, slot: Slot, depth: int, n_rounds: int, progress: Progress | None = None
) -> tuple[list[Drafted], list[Drafted]]:
    """Measure draft steps in rounds of a text after `depth` tokens, then after N_READ new tokens.

    In rounds, as a drafter runs them: a bare pass of a head's context is several times faster. The
    first round, which reads the text, is left out. `depth` is less where the context is small.
    Raises DecodeError, ClosedError.
    """
    target, draft, n_per_step = slot.target, slot.draft, pair.profile.costs.n_per_step
    assert draft is not None
    n_draft = min(N_DRAFTED, pair.n_draft_max)
    filler = filler_tokens(pair.vocab, min(pair.target.n_ctx, depth + MOST_TOKENS))
    n_written = (n_rounds + 1) * (n_draft + 1)
    depth = max(min(depth, len(filler) - n_written - N_READINGS * N_READ), LEAST_DEPTH)
    uniforms, draft_uniforms = uniform_streams(0)
    tokens, sampling = array("i", filler[:depth]), Sampling()
    materials = Materials(sampling, draft_uniforms, (), draft, n_draft_max=n_draft, tree="off")
    n_end = min(depth + n_written, len(filler))
    steps = speculate(
        tokens,
        drafter=make("model", materials),
        verify=rules.rule(defaults.VERIFY),
        sampling=sampling,
        uniforms=uniforms,
        n_draft=n_draft,
        n_end=n_end,
    )
    tell, n_all = progress or (lambda done, of: None), n_end - depth + 1  # 1: for the readings
    tell(0, n_all)
    rounds: list[Drafted] = []
    n_further: int | None = None
    for ask in steps:
        assert isinstance(ask, Ask)
        round_ = steps.send(Scored(target.score(ask.tokens, ask.draft), 0.0))
        assert isinstance(round_, Round)
        if n_further is not None and round_.n_drafted:
            n = ceil(round_.n_drafted / n_per_step)
            rounds.append(Drafted(round_.draft_seconds, n, n_further))
        n_further = int(round_.n_accepted == round_.n_drafted)  # the last token of its draft
        tell(min(len(tokens) - depth, n_all - 1), n_all)
    if materials.policy.failure:
        raise DecodeError(f"the draft cannot be measured: {materials.policy.failure}")
    readings: list[Drafted] = []
    for _ in range(N_READINGS if n_per_step == 1 else 0):
        n_new = N_READ - (len(tokens) - draft.n_common(tokens))
        if len(tokens) + n_new >= len(filler):
            break
        tokens.extend(filler[:n_new])
        target.score(tokens)
        n_read, start = len(tokens) - draft.n_common(tokens), perf_counter()
        draft.score(tokens)
        if n_read > 1:  # a head that reads the target's cells has none to read
            readings.append(Drafted(perf_counter() - start, 1, n_read - 1))
    tell(n_all, n_all)
    return rounds, readings
