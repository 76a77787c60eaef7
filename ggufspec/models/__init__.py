"""Finds models by name: in the registry, on the Hugging Face hub, and on this machine.

from ggufspec.models import resolve

path = resolve("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")
"""

from ggufspec.models.pull import resolve

__all__ = ["resolve"]
