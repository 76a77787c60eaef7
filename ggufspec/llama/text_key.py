"""The key of a saved text: all facts that its cells depend on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import llama_cpp

from ggufspec.common.files import fingerprint_of
from ggufspec.errors import ModelError
from ggufspec.llama.context import Context
from ggufspec.models.header import read_header

_N_BLOCKS = 1025  # of 64 KiB


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
