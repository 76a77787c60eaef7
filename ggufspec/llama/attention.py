"""Measures once per pair which attention its passes on this CPU are fastest with.

There are three ways: flash attention by our kernels or by llama.cpp's, and none.
"""

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
from ggufspec.llama import kernels
from ggufspec.llama.bare_context import BareContext
from ggufspec.llama.context_options import FLASH_ATTENTION, OWN, ContextOptions
from ggufspec.llama.cpu_use import cpu_use, is_busy, were_disturbed
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.kernel_choice import is_disturbed, measuring
from ggufspec.llama.log import logger
from ggufspec.llama.model import Model
from ggufspec.llama.profile_key import pair_key
from ggufspec.llama.threadpool import ThreadPools

SECONDS = 1.0  # limit for measuring a pair; slow passes may take up to three times as long
PASS_SIZES = (1, 4, 8)  # tokens of the passes
_N_WITHOUT_DRAFT = 2  # sizes measured without a draft model: few passes are longer
MOST_SECONDS = 0.1  # of a pass; in slower ones, attention is a small part
DEPTHS = (32, 512)  # tokens in the cache before the pass
FASTER = 0.95  # share of the time with flash attention; repeated measurements differ by 3 %

# Longer texts are measured at about their own depth, a power of two, and so is reading their
# prompts, which takes most of their time. All this costs as much as reading 500 tokens, once.
_LONG, _DEEPEST = 2 * DEPTHS[-1], 8192
PROMPT = 64  # tokens of a pass over a piece of a prompt; larger pieces cost as much per token
_MOST_SECONDS_LONG = 0.5  # of a pass over one token on an empty cache
_N_PER_PASS = 2  # tokens that a pass writes on average, to weigh answers against prompts

_MOST_ROUNDS, _FEWEST_ROUNDS = 9, 2
_N_TRIED = 2  # passes over one token; the first may read weights from the disk
_N_ATTEMPTS = 2  # to measure while other programs disturb it
_SCORE_BYTES = 2**29  # of attention scores, which only attention without flash stores
_WAYS = ("on", "off")  # of flash attention, besides OWN
# Factors of times: ours is used unless another is clearly faster, since texts then do not depend on
# where and beside what they are computed; flash attention is left out only if that is clear.
_WEIGHTS = {OWN: FASTER, "on": 1.0, "off": 1 / FASTER}

# Seconds of one model: by way, then by depth (two), then by tokens (PASS_SIZES; PROMPT).
Times = Mapping[str, Sequence[Sequence[float]]]


class UsualText(NamedTuple):
    """Tokens that the prompt of a usual text has, and tokens that are then written."""

    n_prompt: int
    n_new: int

    @property
    def depth(self) -> int:
        """Tokens before an average pass of the answer; fewer than DEPTHS[0] cost as much."""
        return max(self.n_prompt + self.n_new // 2, DEPTHS[0])

    @property
    def deepest(self) -> int:
        """The depth to measure at, besides DEPTHS[0]; times between the two lie on a line."""
        if self.depth <= _LONG:
            return DEPTHS[-1]
        return int(min(2 ** (self.depth.bit_length() - 1), _DEEPEST))


class Attention(NamedTuple):
    """How a pair computes attention: "own", "auto" (llama.cpp decides) or "off", without flash.

    `ratio`: seconds of a text without flash attention, over seconds with llama.cpp's; None: not
    measured. `own`: the same of ours; None: it cannot be used.
    `seconds`: per model, target first: of passes over PASS_SIZES, with the choice.
    """

    setting: str = defaults.FLASH_ATTENTION
    ratio: float | None = None
    text: UsualText = UsualText(0, 0)
    seconds: Sequence[Sequence[float]] = ()
    own: float | None = None

    @property
    def reason(self) -> str | None:
        """The choice and its reason in one line; None if nothing was measured."""
        if self.ratio is None:
            return None
        what = f"passes after {self.text.depth:,} tokens take"
        if self.text.deepest > DEPTHS[-1]:
            what = f"a prompt of about {self.text.n_prompt:,} tokens and its answer take"
        own = "" if self.own is None else f"with ggufspec's kernels {self.own:.2f} times, and "
        return (
            f"flash attention {self.setting}: {own}without it, {what} {self.ratio:.2f} times as "
            "long on this CPU"
        )


def choose_attention(text: UsualText, *models: Times, has_draft: bool) -> Attention:
    """The choice that a target and its draft share, from their times at `text.deepest`."""
    n_sizes = len(PASS_SIZES) if has_draft else _N_WITHOUT_DRAFT

    def seconds_at(depth: float, times: Times, way: str) -> Sequence[float]:
        share = (depth - DEPTHS[0]) / (text.deepest - DEPTHS[0])
        return [a + share * (b - a) for a, b in zip(*times[way], strict=True)]

    def seconds_of_text(way: str) -> float:
        found = 0.0
        for times in models:
            passes = seconds_at(text.depth, times, way)
            found += max(text.n_new, 1) / _N_PER_PASS * sum(passes[:n_sizes]) / n_sizes
            if text.deepest > DEPTHS[-1]:
                found += text.n_prompt * seconds_at(text.n_prompt / 2, times, way)[-1] / PROMPT
        return found

    seconds = {way: seconds_of_text(way) for way in models[0]}
    way = min(seconds, key=lambda way: _WEIGHTS[way] * seconds[way])
    setting = defaults.FLASH_ATTENTION if way == "on" else way
    chosen = [seconds_at(text.depth, times, way)[: len(PASS_SIZES)] for times in models]
    own = seconds[OWN] / seconds["on"] if OWN in seconds else None
    return Attention(setting, seconds["off"] / seconds["on"], text, chosen, own)


def measure_attention(
    target: Model, draft: Model | None, options: ContextOptions, text: UsualText | None = None
) -> Attention:
    """Measure the passes of a pair and store them, or recall what was measured on this machine.

    `text`: what the pair is loaded for; None: unknown, and then short texts decide.
    Measurements that cannot be stored are not used: texts with a seed would differ between loads.
    Nothing is measured for GPUs, for caches of other types than f16 (quantized ones need flash
    attention), for models with too few positions, or if the attention scores of a long context
    would take too much memory: see unmeasured_attention.
    """
    unmeasured = unmeasured_attention(target, draft)
    if text is None:
        # A usual text fills half of the context, and its average token comes at half of that.
        text = UsualText(0, 2 * min(max(options.n_ctx // 4, DEPTHS[0]), DEPTHS[-1]))
    models = [model for model in (target, draft) if model is not None and not model.is_head]
    if {options.type_k, options.type_v} != {"f16"}:
        return unmeasured
    if any(model.n_gpu_layers or not _has_room(model, options) for model in models):
        return unmeasured
    n_positions = text.deepest + max(_sizes(text.deepest))  # beyond the last, llama.cpp aborts
    if any((model.n_ctx_max or n_positions) < n_positions for model in models):
        return unmeasured
    of_long = {"depth": text.deepest} if text.deepest > DEPTHS[-1] else {}
    facts = {"about": "attention", "pair": pair_key(target, draft, options), **of_long}
    if OWN in _ways():
        facts |= {"instructions": kernels.instructions(), **kernels.extension_files()}
    n_sizes = len(_sizes(text.deepest))
    if _recall(facts, len(models), n_sizes) is None:
        with measuring():
            # Another process may have stored its times meanwhile.
            if _recall(facts, len(models), n_sizes) is None:
                measured = _undisturbed(models, text.deepest)
                if measured is None:
                    logger.warning(
                        "ggufspec: other programs use the processor, so attention is not "
                        "measured: a later load measures it"
                    )
                    return unmeasured
                profile_store.remember(facts, {"seconds": measured})
    times = _recall(facts, len(models), n_sizes)
    return choose_attention(text, *times, has_draft=draft is not None) if times else unmeasured


def unmeasured_attention(*models: Model | None) -> Attention:
    """Ours, where all layers of these models are on the CPU and it works; else llama.cpp's."""
    if any(model.n_gpu_layers for model in models if model is not None):
        return Attention()
    return Attention() if kernels.attention_refusal() else Attention(OWN)


def time_passes(model: Model, until: float, deepest: int = DEPTHS[-1]) -> Times | None:
    """Seconds of passes with and without flash attention, until a time; None: none, or too slow.

    For a depth above DEPTHS[-1], only a pass over one token on an empty cache has a limit.
    """
    depths, sizes, is_long = (DEPTHS[0], deepest), _sizes(deepest), deepest > DEPTHS[-1]
    seconds_each = (until - perf_counter()) / len(depths)
    found: dict[tuple[str, int, int], list[float]] = {}
    with ExitStack() as stack:
        make = partial(BareContext, model.pointer, max(sizes), deepest, ThreadPools())
        contexts = {
            way: stack.enter_context(closing(make(FLASH_ATTENTION[way], way == OWN)))
            for way in _ways()
        }
        most = _MOST_SECONDS_LONG if is_long else MOST_SECONDS
        for context in contexts.values():  # before cells are filled by a pass over many tokens
            if min(context.seconds(1, 1) or inf for _ in range(_N_TRIED)) > most:
                return None
        for depth in depths:
            if not all(context.fill(depth) for context in contexts.values()):
                return None
            began = perf_counter()
            for i in range(_FEWEST_ROUNDS if is_long else _MOST_ROUNDS):
                for (way, context), size in product(contexts.items(), sizes):
                    if size == PROMPT and i:
                        continue
                    seconds = context.seconds(size, size)
                    if seconds is None:
                        return None
                    if not is_long and (seconds > most or perf_counter() > until + SECONDS):
                        return None
                    if i or is_long:  # the first round touches the memory: little of a long text's
                        found.setdefault((way, depth, size), []).append(seconds)
                if i >= _FEWEST_ROUNDS and perf_counter() - began > seconds_each:
                    break
    return {
        way: [[min(found[way, depth, size]) for size in sizes] for depth in depths]
        for way in contexts
    }


def _ways() -> Sequence[str]:
    return (OWN, *_WAYS) if kernels.attention_refusal() is None else _WAYS


def _sizes(deepest: int) -> Sequence[int]:
    return PASS_SIZES if deepest <= DEPTHS[-1] else (*PASS_SIZES, PROMPT)


def _undisturbed(models: Sequence[Model], deepest: int) -> Sequence[Times] | None:
    """What `_measure` returns; None if other programs disturb it.

    Passes are too slow only if they are so twice: a short load can be the reason.
    """
    n_threads, n_slow = n_threads_default(), 0
    for _ in range(_N_ATTEMPTS):
        if is_busy(n_threads):
            return None
        began = cpu_use()
        measured = _measure(models, deepest)
        if were_disturbed(began, n_threads):
            return None
        of_depths = (seconds for times in measured for of in times.values() for seconds in of)
        if measured and not any(map(is_disturbed, of_depths)):
            return measured
        n_slow += not measured
    return () if n_slow == _N_ATTEMPTS else None


def _measure(models: Sequence[Model], deepest: int) -> Sequence[Times]:
    """The times of each model; empty if one cannot be measured in time."""
    found, until = [], perf_counter()
    for model in models:
        until += SECONDS / len(models)
        times = None if model.attention_heads is None else time_passes(model, until, deepest)
        if times is None:
            return ()
        found.append(times)
    return found


def _has_room(model: Model, options: ContextOptions) -> bool:
    n_scores = min(options.n_batch, options.n_ctx) * options.n_ctx * options.n_sequences
    n_heads = model.attention_heads.n if model.attention_heads else 0
    return 4 * n_scores * n_heads <= max(_SCORE_BYTES, model.n_bytes // 4)


def _recall(facts: Mapping[str, object], n_models: int, n_sizes: int) -> Sequence[Times] | None:
    """The stored times of the models; empty where they could not be measured."""
    found = (profile_store.recall(facts) or {}).get("seconds")
    if not isinstance(found, list) or len(found) not in (0, n_models):
        return None
    return found if all(_is_valid(times, n_sizes) for times in found) else None


def _is_valid(times: object, n_sizes: int) -> bool:
    if not isinstance(times, dict) or {*times} - {OWN} != {*_WAYS}:
        return False
    return all(
        np.shape(seconds) == (len(DEPTHS), n_sizes) and bool(np.all(np.asarray(seconds) > 0))
        for seconds in times.values()
    )
