"""Speculative decoding for GGUF models, with exactly the target's distribution.

    import ggufspec

    with ggufspec.load(target="large.gguf", draft="small.gguf") as engine:
        print(engine.generate("Once upon a time", max_tokens=100).text)

`__all__` lists the public names. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ggufspec import errors
from ggufspec.errors import *  # noqa: F403

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats as Stats
    from ggufspec.engine.async_stream import AsyncStream as AsyncStream
    from ggufspec.engine.engine import Engine as Engine
    from ggufspec.engine.load import load as load
    from ggufspec.engine.stream import Stream as Stream
    from ggufspec.engine.text import Chunk as Chunk
    from ggufspec.engine.text import Completion as Completion
    from ggufspec.llama.python_llama import DraftModel as DraftModel

__version__ = "0.1.0"

_MODULES = {
    "AsyncStream": "engine.async_stream",
    "Chunk": "engine.generation",
    "Completion": "engine.generation",
    "DraftModel": "llama.python_llama",
    "Engine": "engine.engine",
    "Stats": "decoding.stats",
    "Stream": "engine.stream",
    "load": "engine.load",
}
__all__ = sorted([*errors.__all__, *_MODULES])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
