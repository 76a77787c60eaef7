"""What costs depend on, told so that another process can know it again. Measures nothing."""

from __future__ import annotations

from ggufspec.drafting.profile_store import fingerprint
from ggufspec.llama.context import Context, ContextOptions
from ggufspec.llama.devices import machine
from ggufspec.llama.model import Model


def pair_facts(target: Model, draft: Model | None, options: ContextOptions) -> dict[str, object]:
    """A pair on a machine; of the options, those that nobody chooses for being fast."""
    return {
        "target": _model_facts(target),
        "draft": _model_facts(draft) if draft else None,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "machine": machine(),
    }


def facts(target: Context, draft: Context | None) -> dict[str, object]:
    """All that the costs of a loaded pair depend on."""
    return {
        "pair": pair_facts(target.model, draft.model if draft else None, target.options),
        "n_threads": target.n_threads,
        "n_threads_draft": draft.n_threads if draft else None,
        "flash_attention": target.options.flash_attention,
    }


def _model_facts(model: Model) -> dict[str, object]:
    found: dict[str, object] = {
        "description": model.description,
        "n_params": model.n_params,
        "n_bytes": model.n_bytes,
        "fingerprint": fingerprint(model.path),
        "n_gpu_layers": model.n_gpu_layers,
    }
    if model.rpc:
        found["rpc"] = {"devices": [*model.rpc], "split": [*model.tensor_split]}
    return found
