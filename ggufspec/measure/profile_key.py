"""Keys of stored measurements: JSON of all facts that the costs of a pair depend on."""

from __future__ import annotations

from ggufspec.drafting.profile_store import fingerprint
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.devices import machine
from ggufspec.llama.model import Model
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
