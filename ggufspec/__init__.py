"""Speculative decoding for GGUF models, with exactly the target's distribution.

    import ggufspec

    with ggufspec.load(target="large.gguf", draft="small.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=100).text)

The public names are those in __all__. Importing this package loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ggufspec.errors import (
    CacheError,
    ClosedError,
    DecodeError,
    DownloadError,
    GgufspecError,
    ModelError,
    OptionError,
    OutOfMemoryError,
    PromptError,
    RpcError,
    VocabError,
)

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.generation import Chunk, Completion
    from ggufspec.engine.load import load
    from ggufspec.engine.stream import Stream
    from ggufspec.llama.draft_model import DraftModel

__version__ = "0.1.0"
__all__ = [
    "CacheError",
    "Chunk",
    "ClosedError",
    "Completion",
    "DecodeError",
    "DownloadError",
    "DraftModel",
    "Engine",
    "GgufspecError",
    "ModelError",
    "OptionError",
    "OutOfMemoryError",
    "PromptError",
    "RpcError",
    "Stats",
    "Stream",
    "VocabError",
    "load",
]

_HOMES = {
    "Chunk": "ggufspec.engine.generation",
    "Completion": "ggufspec.engine.generation",
    "DraftModel": "ggufspec.llama.draft_model",
    "Engine": "ggufspec.engine.engine",
    "Stats": "ggufspec.decoding.stats",
    "Stream": "ggufspec.engine.stream",
    "load": "ggufspec.engine.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
