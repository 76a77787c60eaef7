"""Chooses which attention the passes of a pair on this CPU are fastest with.

There are three ways: flash attention by our kernels or by llama.cpp's, and none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from ggufspec.common import defaults
from ggufspec.llama import kernels
from ggufspec.llama.context_options import OWN, ContextOptions, default_attention
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.log import logger
from ggufspec.llama.model import Model
from ggufspec.measure import table
from ggufspec.measure.disturbed import Watch, undisturbed
from ggufspec.measure.kernels import measuring
from ggufspec.measure.passes import PIECE, SIZES, time_rows
from ggufspec.measure.table import Row, Table

SECONDS = 0.5  # of repeated passes of a model; slow passes may take several times as long
_N_WITHOUT_DRAFT = 2  # sizes that count without a draft model: few passes are longer
MOST_SECONDS = 0.1  # of a pass; in slower ones, attention is a small part
DEPTHS = (32, 512)  # tokens in the cache before the pass
FASTER = 0.95  # share of the time with flash attention; repeated measurements differ by 3 %

# Longer texts are measured at about their own depth, a power of two, and so is reading their
# prompts, which takes most of their time. All this costs as much as reading 500 tokens, once.
_LONG, _DEEPEST = 2 * DEPTHS[-1], 8192
_MOST_SECONDS_LONG = 0.5  # of a pass over one token on an empty cache
_N_PER_PASS = 2  # tokens that a pass writes on average, to weigh answers against prompts

_SCORE_BYTES = 2**29  # of attention scores, which only attention without flash stores
_WAYS = ("on", "off")  # of flash attention, besides OWN
# Factors of times: ours is used unless another is clearly faster, since texts then do not depend on
# where and beside what they are computed; flash attention is left out only if that is clear.
_WEIGHTS = {OWN: FASTER, "on": 1.0, "off": 1 / FASTER}

# The rows of a model that decide, their seconds, and the most these may be.
_Wanted = Sequence[tuple[Row, float | None, float]]


class UsualText(NamedTuple):
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

    @property
    def passes(self) -> list[tuple[int, int]]:
        """The passes to measure: (tokens, depth); the first says at once whether they are slow."""
        sizes = SIZES if self.deepest <= DEPTHS[-1] else (*SIZES, PIECE)
        return [(1, 0), *product(sizes, (DEPTHS[0], self.deepest))]

    @property
    def most_seconds(self) -> Mapping[tuple[int, int], float]:
        if self.deepest > DEPTHS[-1]:
            return {(1, 0): _MOST_SECONDS_LONG}
        return dict.fromkeys(self.passes, MOST_SECONDS)


class Attention(NamedTuple):
    """How a pair computes attention: "own", "auto" (llama.cpp decides) or "off", without flash.

    `ratio`: seconds of a text without flash attention, over seconds with llama.cpp's; None: not
    measured. `own`: the same of ours; None: it cannot be used.
    """

    setting: str = defaults.FLASH_ATTENTION
    ratio: float | None = None
    text: UsualText = UsualText(0, 0)
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


def measure_attention(
    target: Model, draft: Model | None, options: ContextOptions, text: UsualText | None = None
) -> Attention:
    """The choice by the tables of a pair, whose missing rows are measured.

    `text`: what the pair is loaded for; None: unknown, and then short texts decide.
    Measurements that cannot be stored are not used: texts with a seed would differ between loads.
    Nothing is measured for GPUs, for caches of other types than f16 (quantized ones need flash
    attention), for models with too few positions, or if the attention scores of a long context
    would take too much memory: see default_attention.
    """
    unmeasured = Attention(default_attention(target, draft))
    text = text or usual_text(options)
    models = [model for model in (target, draft) if model is not None and not model.is_head]
    if {options.type_k, options.type_v} != {defaults.KV_TYPE}:
        return unmeasured
    if any(model.n_gpu_layers or not _has_room(model, options) for model in models):
        return unmeasured
    n_positions = text.deepest + max(n for n, _ in text.passes)  # beyond the last, llama.cpp aborts
    if any((model.n_ctx_max or n_positions) < n_positions for model in models):
        return unmeasured
    if any(model.attention_heads is None for model in models):
        return unmeasured
    wanted = [_wanted(model, text) for model in models]
    if not all(map(_is_known, wanted)):
        with measuring():
            for i, model in enumerate(models):
                wanted[i] = _measured(model, text)
                if not _is_known(wanted[i]):
                    return unmeasured
    if any(map(_is_slow, wanted)):
        return unmeasured
    # Only the rows that decide: others, which are added later, would change the choice.
    found = [
        ({row: seconds for row, seconds, _ in rows if seconds}, [*model.kernels.types])
        for rows, model in zip(wanted, models, strict=True)
    ]
    return choose(text, found, has_draft=draft is not None)


def usual_text(options: ContextOptions) -> UsualText:
    """A text that fills half of the context; its average token comes at half of that."""
    return UsualText(0, 2 * min(max(options.n_ctx // 4, DEPTHS[0]), DEPTHS[-1]))


def choose(
    text: UsualText, models: Sequence[tuple[Table, Sequence[str]]], *, has_draft: bool
) -> Attention:
    """The choice that a target and its draft share.

    models: of each its table, and the types of weights that our kernels multiply.
    """
    n_sizes = len(SIZES) if has_draft else _N_WITHOUT_DRAFT

    def seconds_of_text(way: str) -> float:
        found = 0.0
        for rows, types in models:
            passes = table.seconds(rows, types, way, text.depth)
            few = sum(passes[size] for size in SIZES[:n_sizes]) / n_sizes
            found += max(text.n_new, 1) / _N_PER_PASS * few
            if text.deepest > DEPTHS[-1]:
                pieces = table.seconds(rows, types, way, text.n_prompt / 2)
                found += text.n_prompt * pieces[PIECE] / PIECE
        return found

    ways = [
        way
        for way in _ways()
        if all(table.seconds(rows, types, way, text.depth) for rows, types in models)
    ]
    seconds = {way: seconds_of_text(way) for way in ways}
    way = min(seconds, key=lambda way: _WEIGHTS[way] * seconds[way])
    setting = defaults.FLASH_ATTENTION if way == "on" else way
    own = seconds[OWN] / seconds["on"] if OWN in seconds else None
    return Attention(setting, seconds["off"] / seconds["on"], text, own)


def _ways() -> Sequence[str]:
    return (OWN, *_WAYS) if kernels.attention_refusal() is None else _WAYS


def _wanted(model: Model, text: UsualText) -> _Wanted:
    rows, types = table.recall(table.key_of(model)), " ".join(model.kernels.types)
    most_seconds = text.most_seconds
    wanted = [(Row(types, way, *at), at) for way in _ways() for at in text.passes]
    return [(row, rows.get(row), most_seconds.get(at, inf)) for row, at in wanted]


def _is_slow(wanted: _Wanted) -> bool:
    return any(seconds and seconds > most for _, seconds, most in wanted)


def _is_known(wanted: _Wanted) -> bool:
    return _is_slow(wanted) or all(seconds for _, seconds, _ in wanted)


def _measured(model: Model, text: UsualText) -> _Wanted:
    """The rows of a model, measured unless another process has stored them meanwhile."""
    if _is_known(wanted := _wanted(model, text)):
        return wanted
    found = undisturbed(lambda watch: time_passes(model, text, watch), n_threads_default())
    if found is None:
        logger.warning(
            "ggufspec: other programs use the processor, so attention is not measured: a later "
            "load measures it"
        )
    table.add(table.key_of(model), found or {})
    return _wanted(model, text)


def time_passes(model: Model, text: UsualText, watch: Watch) -> Table:
    """The missing rows of a model for `text`; fewer if a pass is too slow, none if it has none.

    Raises Disturbed.
    """
    missing = {(row.n_tokens, row.depth) for row, seconds, _ in _wanted(model, text) if not seconds}
    kinds = [(model, way) for way in _ways()]
    return time_rows(kinds, missing, watch, at_least=SECONDS, most=text.most_seconds)


def _has_room(model: Model, options: ContextOptions) -> bool:
    n_scores = min(options.n_batch, options.n_ctx) * options.n_ctx * options.n_sequences
    n_heads = model.attention_heads.n if model.attention_heads else 0
    return 4 * n_scores * n_heads <= max(_SCORE_BYTES, model.n_bytes // 4)
