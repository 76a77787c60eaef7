"""The LoRA adapters as llama.cpp's server has them, but for scales of a request's own."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.server.schema import AdapterScale


def described(engine: Engine) -> list[dict[str, object]]:
    """Number, file and scale of each; no path, but the name of the file."""
    return [
        {"id": i, "path": each.path.name, "scale": each.scale}
        for i, each in enumerate(engine.pair.target.model.adapters)
    ]


def check_scales(asked: Sequence[AdapterScale], engine: Engine) -> None:
    """Raise OptionError for other scales than those that are loaded; one that is left out is 0.

    Texts share passes of the target and the KV caches of earlier ones: all need the same scales.
    """
    loaded = [each.scale for each in engine.pair.target.model.adapters]
    wanted = [0.0] * len(loaded)
    for each in asked:
        if not 0 <= each.id < len(loaded):
            raise OptionError(
                f"there is no LoRA adapter {each.id}; the server has {len(loaded)}, numbered from "
                "0 (GET /lora-adapters)"
            )
        wanted[each.id] = each.scale
    if wanted != loaded:
        raise OptionError(
            f"the scales of the LoRA adapters are {loaded} for all texts, as these share passes; "
            f"{wanted} were asked for: send the former, or start another server with other scales "
            "(--lora FILE:SCALE)"
        )
