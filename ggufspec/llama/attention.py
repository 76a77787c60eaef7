"""Measures once per pair whether its passes on this CPU are faster without flash attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ggufspec.common import defaults
from ggufspec.drafting import profile_store
from ggufspec.llama.context_options import FLASH_ATTENTION, ContextOptions
from ggufspec.llama.kernel_choice import BareContext, is_disturbed
from ggufspec.llama.model import Model
from ggufspec.llama.profile_key import pair_key
from ggufspec.llama.threadpool import ThreadPools

SECONDS = 1.0  # limit for measuring a pair; slow passes may take up to three times as long
SIZES = (1, 4, 8)  # tokens of the passes
_N_WITHOUT_DRAFT = 2  # sizes measured without a draft model: few passes are longer
MOST_SECONDS = 0.1  # of a pass; in slower ones, attention is a small part
DEPTHS = (32, 512)  # tokens in the cache before the pass
FASTER = 0.95  # share of the time with flash attention; repeated measurements differ by 3 %

_MOST_ROUNDS, _FEWEST_ROUNDS = 9, 2
_N_TRIED = 2  # passes over one token; the first may read weights from the disk
_SCORE_BYTES = 2**29  # of attention scores, which only attention without flash stores
_WAYS = ("on", "off")  # of flash attention

# Seconds of one model: by "on" or "off", then by depth (DEPTHS), then by tokens (SIZES).
Times = Mapping[str, Sequence[Sequence[float]]]


class Attention(NamedTuple):
    """How a pair computes attention: "auto" (llama.cpp decides) or "off", without flash attention.

    `ratio`: seconds of passes after `depth` tokens without flash attention, over seconds with it;
    None: not measured. `seconds`: per model, target first: of passes over SIZES, with the choice.
    """

    setting: str = defaults.FLASH_ATTENTION
    ratio: float | None = None
    depth: int = 0
    seconds: Sequence[Sequence[float]] = ()

    @property
    def reason(self) -> str | None:
        """The choice and its reason in one line; None if nothing was measured."""
        if self.ratio is None:
            return None
        return (
            f"flash attention {self.setting}: without it, passes after {self.depth} tokens take "
            f"{self.ratio:.2f} times as long on this CPU"
        )


def choose_attention(depth: int, *models: Times, has_draft: bool) -> Attention:
    """The choice that a target and its draft share, for texts of about `depth` tokens."""
    n_sizes = len(SIZES) if has_draft else _N_WITHOUT_DRAFT
    share = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    at_depth = {
        way: [[a + share * (b - a) for a, b in zip(*times[way], strict=True)] for times in models]
        for way in _WAYS
    }
    plain, flash = (sum(sum(of[:n_sizes]) for of in at_depth[way]) for way in ("off", "on"))
    ratio = plain / flash
    setting, way = ("off", "off") if ratio < FASTER else (defaults.FLASH_ATTENTION, "on")
    return Attention(setting, ratio, depth, at_depth[way])


def known_attention(target: Model, draft: Model | None, options: ContextOptions) -> Attention:
    """The choice for a pair on this machine; the first time, its passes are measured and stored.

    Measurements that cannot be stored are not used: texts with a seed would differ between loads.
    Nothing is measured for GPUs, for caches of other types than f16 (quantized ones need flash
    attention), or if the attention scores of a long context would take too much memory.
    """
    models = [model for model in (target, draft) if model is not None and not model.is_head]
    if {options.type_k, options.type_v} != {"f16"}:
        return Attention()
    if any(model.n_gpu_layers or not _has_room(model, options) for model in models):
        return Attention()
    facts = {"about": "attention", "pair": pair_key(target, draft, options)}
    if _recall(facts, len(models)) is None:
        measured = _measure(models)
        of_depths = (seconds for times in measured for of in times.values() for seconds in of)
        if any(map(is_disturbed, of_depths)):
            return Attention()
        if _recall(facts, len(models)) is None:  # another process may have stored its own meanwhile
            profile_store.remember(facts, {"seconds": measured})
    # A usual text fills half of the context, and its average token comes at half of that.
    depth = min(max(options.n_ctx // 4, DEPTHS[0]), DEPTHS[1])
    times = _recall(facts, len(models))
    return choose_attention(depth, *times, has_draft=draft is not None) if times else Attention()


def time_passes(model: Model, until: float) -> Times | None:
    """Seconds of passes with and without flash attention, until a time; None: none, or too slow."""
    seconds_each = (until - perf_counter()) / len(DEPTHS)
    found: dict[tuple[str, int, int], list[float]] = {}
    with ExitStack() as stack:
        make = partial(BareContext, model.pointer, max(SIZES), DEPTHS[-1], ThreadPools())
        contexts = {way: stack.enter_context(closing(make(FLASH_ATTENTION[way]))) for way in _WAYS}
        for context in contexts.values():  # before cells are filled by a pass over many tokens
            if min(context.seconds(1, 1) or inf for _ in range(_N_TRIED)) > MOST_SECONDS:
                return None
        for depth in DEPTHS:
            if not all(context.fill(depth) for context in contexts.values()):
                return None
            began = perf_counter()
            for i in range(_MOST_ROUNDS):
                for (way, context), size in product(contexts.items(), SIZES):
                    seconds = context.seconds(size, size)
                    is_late = perf_counter() > until + SECONDS
                    if seconds is None or seconds > MOST_SECONDS or is_late:
                        return None
                    if i:  # the first round touches the memory
                        found.setdefault((way, depth, size), []).append(seconds)
                if i >= _FEWEST_ROUNDS and perf_counter() - began > seconds_each:
                    break
    return {
        way: [[min(found[way, depth, size]) for size in SIZES] for depth in DEPTHS] for way in _WAYS
    }


def _measure(models: Sequence[Model]) -> Sequence[Times]:
    """The times of each model; empty if one cannot be measured in time."""
    found, until = [], perf_counter()
    for model in models:
        until += SECONDS / len(models)
        times = None if model.heads is None else time_passes(model, until)
        if times is None:
            return ()
        found.append(times)
    return found


def _has_room(model: Model, options: ContextOptions) -> bool:
    n_scores = min(options.n_batch, options.n_ctx) * options.n_ctx * options.n_sequences
    n_heads = model.heads.n if model.heads else 0
    return 4 * n_scores * n_heads <= max(_SCORE_BYTES, model.n_bytes // 4)


def _recall(facts: Mapping[str, object], n_models: int) -> Sequence[Times] | None:
    """The stored times of the models; empty where they could not be measured."""
    found = (profile_store.recall(facts) or {}).get("seconds")
    if not isinstance(found, list) or len(found) not in (0, n_models):
        return None
    return found if all(map(_is_valid, found)) else None


def _is_valid(times: object) -> bool:
    if not isinstance(times, dict) or {*times} != {*_WAYS}:
        return False
    return all(
        np.shape(seconds) == (len(DEPTHS), len(SIZES)) and bool(np.all(np.asarray(seconds) > 0))
        for seconds in times.values()
    )
