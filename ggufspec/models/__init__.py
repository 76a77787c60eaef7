"""Finds models by name: in the registry, on the Hugging Face hub, and on this machine.

from ggufspec.models import resolve

path = resolve("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")
"""

from __future__ import annotations

from ggufspec.models.pull import resolve
from ggufspec.models.registry import Dimensions, ModelEntry, ModelPair, Registry, load_registry

__all__ = ["Dimensions", "ModelEntry", "ModelPair", "Registry", "load_registry", "resolve"]
