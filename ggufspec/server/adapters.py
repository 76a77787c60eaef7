"""LoRA adapters as in llama.cpp's server, except that requests cannot change scales."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.server.schema import AdapterScale


def described(engine: Engine) -> list[dict[str, object]]:
    """Number, file name (without its path) and scale of each adapter."""
    return [
        {"id": i, "path": each.path.name, "scale": each.scale}
        for i, each in enumerate(engine.pair.target.model.adapters)
    ]


def check_scales(asked: Sequence[AdapterScale], engine: Engine) -> None:
    """Raise OptionError unless the scales equal the loaded ones; adapters left out have scale 0.

    All texts need the same scales, since they share passes of the target and KV caches.
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
            f"the request has {wanted}: send the loaded scales, or start another server with other "
            "scales (--lora FILE:SCALE)"
        )
