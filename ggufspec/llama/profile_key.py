"""Keys of stored measurements: JSON of all facts that the costs of a pair depend on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import llama_cpp

from ggufspec.common.files import fingerprint_of
from ggufspec.drafting.profile_store import fingerprint
from ggufspec.errors import ModelError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.devices import machine
from ggufspec.llama.model import Model
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import read_header

_N_BLOCKS = 1025  # of 64 KiB


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


def text_key(context: Context) -> dict[str, object]:
    """All facts that saved cells of a text depend on: cells with another key cannot be used."""
    model, options, link = context.model, context.options, context.link
    is_unified = context.can_share_passes or context.n_leaves > 1
    return {
        "model": model.description,
        "n_params": model.n_params,
        "fingerprint": _content(model.path),
        "LoRA": [[_content(each.path), each.scale] for each in model.adapters],
        "override_kv": [*map(str, model.key_overrides)],
        "is_head": link is not None,
        "n_vocab": context.n_vocab,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "flash_attention": options.flash_attention,
        # llama.cpp restores nothing into a cache that is divided otherwise.
        "n_slots of separate caches": 1 if is_unified else context.n_sequences,
        "llama_cpp_python": llama_cpp.__version__,
    }


def _content(path: Path) -> str | None:
    """A hash of a model file's content: all of it up to 64 MiB, else blocks spread over the file.

    Unlike a `fingerprint`, it differs between trainings of one model. None if it cannot be read.
    """
    try:
        stat = path.stat()
        return _hash_of(path, stat.st_size, stat.st_mtime_ns)
    except (OSError, ModelError):
        return None


@cache
def _hash_of(path: Path, n_bytes: int, changed_at: int) -> str:
    return fingerprint_of(read_header(path).paths, _N_BLOCKS)


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
