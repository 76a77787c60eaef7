"""Of a pair: the keys of what is stored, and its first costs, from the tables of its models."""

from __future__ import annotations

import numpy as np

from ggufspec.drafting.constants import UNMEASURED_STEP
from ggufspec.drafting.cost_model import Start
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import OWN, ContextOptions
from ggufspec.llama.devices import machine
from ggufspec.llama.model import Model
from ggufspec.measure import table
from ggufspec.measure.attention import UsualText, usual_text
from ggufspec.models.head_facts import MTP


def profile_key(target: Context, draft: Context | None = None) -> dict[str, object]:
    """The key of costs and acceptance rates of a loaded pair."""
    rare: dict[str, object] = {}
    if draft is not None and draft.options.n_kept:
        rare["n_ctx_draft"] = draft.options.n_kept
    return {
        **rare,
        "pair": pair_key(target.model, draft.model if draft else None, target.options),
        "n_threads": target.n_threads,
        "n_threads_draft": draft.n_threads if draft else None,
        "flash_attention": target.options.flash_attention,
    }


def pair_key(target: Model, draft: Model | None, options: ContextOptions) -> dict[str, object]:
    """The key of a pair's tuned settings; it excludes the settings that are tuned.

    Target and draft are the same model if the head in the target's own file drafts.
    """
    return {
        "target": _model_key(target),
        "draft": _model_key(draft) | ({"head": MTP} if draft is target else {}) if draft else None,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "machine": machine(),
    }


def _model_key(model: Model) -> dict[str, object]:
    found: dict[str, object] = {
        "description": model.description,
        "n_params": model.n_params,
        "n_bytes": model.n_bytes,
        "fingerprint": fingerprint(model.path),
        "n_gpu_layers": model.n_gpu_layers,
    }
    if not model.repack:
        found["repack"] = False
    if len(model.devices) > 1:
        found["split"] = [*model.tensor_split]  # none: by free memory
    lists: dict[str, list[object]] = {
        "kernels": [*model.kernels.types],
        "overrides": [*map(str, model.overrides)],
        "override_kv": [*map(str, model.key_overrides)],
        # They change what is accepted, and what a pass costs.
        "lora": [[fingerprint(each.path), each.scale] for each in model.adapters],
        "devices": [*model.devices],
    }
    return found | {name: each for name, each in lists.items() if each}


def first_costs(
    target: Context, draft: Context | None, n_most: int, text: UsualText | None = None
) -> Start | None:
    """Costs at the depth of a usual `text`, for passes of up to `n_most` tokens.

    None for models whose passes were not measured when they were first loaded.
    """
    depth = (text or usual_text(target.options)).depth
    of_target, of_draft = (_seconds(each, depth) if each else {} for each in (target, draft))
    if len(of_target) < 2:
        return None
    sizes, seconds = [*of_target], [*of_target.values()]
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    curve = np.interp(range(1, n_most + 1), sizes, seconds)
    further = [seconds[-1] + slope * (n - sizes[-1]) for n in range(sizes[-1] + 1, n_most + 1)]
    step, guesses_step = UNMEASURED_STEP * seconds[0], True  # of a head, which has no passes alone
    read = step
    if draft and draft.model is not target.model and of_draft.keys() >= {1, 2}:
        step, guesses_step = of_draft[1], False
        read = max(of_draft[2] - of_draft[1], 0.0)
    measured = [*map(float, curve[: sizes[-1]]), *further]
    return Start(measured, step, read, is_measured=True, guesses_step=guesses_step)


def _seconds(context: Context, depth: int) -> dict[int, float]:
    types = [*context.model.kernels.types]
    ways = dict.fromkeys((table.way(context.options.flash_attention), OWN, "on"))
    for about in (table.key_in(context), table.key_of(context.model)):
        rows = table.recall(about)
        for way in ways:
            if len(found := table.curve(rows, types, way, depth)) > 1:
                return found
    return {}
