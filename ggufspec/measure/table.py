"""The record of what whole passes of a model take: one table for each model, placement and machine.

Kernels, flash attention and the first costs of a pair are chosen from it. A time is stored only if
it was undisturbed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ggufspec.common import defaults
from ggufspec.drafting import profile_store
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import ModelError
from ggufspec.llama import devices, kernels
from ggufspec.llama.context import Context
from ggufspec.llama.kernel_offer import Placed
from ggufspec.llama.model import Model
from ggufspec.models.adapters import Adapters
from ggufspec.models.gguf_file import Tensor
from ggufspec.models.header import read_header

LEARNED_DEPTH = 256  # tokens before a pass, of costs that were learned in short texts
_ABOUT = "passes"


class Row(NamedTuple):
    """A kind of pass, over `n_tokens` after `depth` tokens.

    types: of weights that our kernels multiply. attention: "own", "on" (llama.cpp's) or "off".
    """

    types: str
    attention: str
    n_tokens: int
    depth: int


Table = Mapping[Row, float]  # seconds


def key(
    path: Path,
    placed: Placed,
    *,
    adapters: Adapters = (),
    n_threads: int | None = None,
    type_k: str = defaults.KV_TYPE,
    type_v: str = defaults.KV_TYPE,
) -> dict[str, object]:
    """All facts that each row of a model's table depends on."""
    matrices: Sequence[Tensor] = ()
    with suppress(ModelError):  # the file is gone: nothing is stored
        matrices = read_header(path).matrices
    found: dict[str, object] = {
        "about": _ABOUT,
        "model": fingerprint(path),
        "types": sorted({each.type for each in matrices}),
        "n_bytes": sum(each.n_bytes for each in matrices),
        **kernels.build_key(),
        "extension": kernels.extension_files(),
        "instructions": kernels.instructions(),
        "n_threads": n_threads or devices.n_threads_default(),
    }
    rare: dict[str, object] = {
        "devices": [*placed.devices],
        "n_gpu_layers": placed.n_layers if placed.devices else 0,
        "overrides": [*map(str, placed.overrides)],
        "lora": [[fingerprint(each.path), each.scale] for each in adapters],
        "caches": [] if {type_k, type_v} == {defaults.KV_TYPE} else [type_k, type_v],
    }
    return found | {name: each for name, each in rare.items() if each}


def key_of(model: Model) -> dict[str, object]:
    """The key of a loaded model, with the default number of threads and types of caches."""
    return key(model.path, model.placed, adapters=model.adapters)


def key_in(context: Context) -> dict[str, object]:
    """The key of a model with the threads and caches of a context."""
    model, options = context.model, context.options
    return key(
        model.path,
        model.placed,
        adapters=model.adapters,
        n_threads=context.n_threads,
        type_k=options.type_k,
        type_v=options.type_v,
    )


def rows_in(context: Context, seconds: Mapping[int, float], depth: int) -> Table:
    """The rows of passes in a context, from their seconds by tokens."""
    types = " ".join(context.model.kernels.types)
    attention = way(context.options.flash_attention)
    return {Row(types, attention, n, depth): each for n, each in seconds.items()}


def way(attention: str) -> str:
    """The attention of rows: what llama.cpp decides is flash attention, wherever it can be."""
    return "on" if attention == defaults.FLASH_ATTENTION else attention


def recall(about: Mapping[str, object]) -> Table:
    """The rows that are stored under a key; empty if there are none."""
    return _rows((profile_store.recall(about) or {}).get("rows"))


def add(
    about: Mapping[str, object],
    rows: Table,
    assumed: Mapping[str, float] | None = None,
    *,
    replaces: bool = False,
) -> bool:
    """Store rows. Known ones that decided stay, so that choices do not change, unless `replaces`.

    assumed: seconds of a pass over one token on "host" and "gpu": see engine.speeds. Returns False
    if there are no rows, or they cannot be stored.
    """

    def merged(document: Mapping[str, object]) -> dict[str, object]:
        known = _rows(document.get("rows"))
        table = {**known, **rows} if replaces else {**rows, **known}
        found = {"rows": [[*row, seconds] for row, seconds in sorted(table.items())]}
        return {**document, **found, **({"assumed": assumed} if assumed else {})}

    is_known = about["model"] is not None
    return bool(rows) and is_known and profile_store.update(about, merged)


class Record(NamedTuple):
    """A stored table. facts: its key. assumed: see add; empty if unknown."""

    facts: Mapping[str, Any]
    rows: Table
    assumed: Mapping[str, float]


def records() -> Iterator[Record]:
    for _, facts, document in map(astuple, profile_store.records()):
        is_whole = isinstance(facts.get("n_bytes"), int)
        if facts.get("about") == _ABOUT and is_whole:
            found = document.get("assumed")
            parts = found.items() if isinstance(found, dict) else ()
            assumed = {of: each for of, each in parts if isinstance(each, (int, float))}
            yield Record(facts, _rows(document.get("rows")), assumed)


def of_same_types(about: Mapping[str, object]) -> Iterator[tuple[Table, int]]:
    """Tables of other models with the same types of weights on this machine, and their bytes."""

    def shared(facts: Mapping[str, object]) -> dict[str, object]:
        return {name: each for name, each in facts.items() if name not in ("model", "n_bytes")}

    for facts, rows, _ in records():
        if shared(facts) == shared(about) and facts.get("model") != about["model"]:
            yield rows, facts["n_bytes"]


def seconds(table: Table, types: Collection[str], attention: str, depth: float) -> dict[int, float]:
    """Seconds by tokens of a pass, on the line between the depths that were measured around it."""
    measured = _measured(table, types, attention)
    return {n: _between(by_depth, depth) for n, by_depth in measured.items()}


def curve(table: Table, types: Collection[str], attention: str, depth: float) -> dict[int, float]:
    """`seconds` of the sizes that were measured at the same depths as passes over one token."""
    measured = _measured(table, types, attention)
    around = {*_around(measured.get(1, {}), depth)}
    found = seconds(table, types, attention, depth)
    return {n: found[n] for n, by_depth in measured.items() if by_depth.keys() >= around}


def _measured(table: Table, types: Collection[str], attention: str) -> dict[int, dict[int, float]]:
    name, found = " ".join(types), dict[int, dict[int, float]]()
    for row, each in sorted(table.items()):
        if (row.types, row.attention) == (name, attention):
            found.setdefault(row.n_tokens, {})[row.depth] = each
    return found


def _around(by_depth: Mapping[int, float], depth: float) -> Sequence[int]:
    """The measured depths below and above a depth, or one: the same, or that on the only side."""
    depths = [*by_depth]
    i = bisect_right(depths, depth)
    return depths[max(i - 1, 0) : i + (depth not in by_depth)]


def _between(by_depth: Mapping[int, float], depth: float) -> float:
    around = _around(by_depth, depth)
    a, b = around[0], around[-1]
    share = (depth - a) / (b - a) if a < b and depth > a else 0.0
    return by_depth[a] + share * (by_depth[b] - by_depth[a])


def _rows(found: object) -> Table:
    """The rows of a document; those that cannot be right are left out."""
    rows = found if isinstance(found, list) else []
    return {Row(*each[:4]): float(each[4]) for each in rows if _is_row(each)}


def _is_row(found: object) -> bool:
    if not isinstance(found, list) or [*map(type, found)] != [str, str, int, int, float]:
        return False
    _, _, n_tokens, depth, each = found
    return bool(n_tokens > 0 and depth >= 0 and isfinite(each) and each > 0)
