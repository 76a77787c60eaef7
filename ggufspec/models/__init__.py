"""Models by name: registered ones, those on the hub, those on this machine. Loads none of them.

    from ggufspec.models import resolve

    path = resolve("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")

The only importer of huggingface_hub.
"""

from __future__ import annotations

from ggufspec.models.pull import resolve
from ggufspec.models.registry import Dimensions, ModelEntry, ModelPair, Registry, load_registry

__all__ = ["Dimensions", "ModelEntry", "ModelPair", "Registry", "load_registry", "resolve"]
