"""Small models of each architecture, for stand-ins that take milliseconds, and their logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ggufspec.decoding.types import Logits
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.models.registry import Dimensions

N_VOCAB = 2048
MIXTURES = {
    "qwen3moe": {"n_experts": 8, "n_experts_used": 2},
    "gpt-oss": {"n_experts": 16, "n_experts_used": 2},
    "glm4moe": {
        **{"n_experts": 16, "n_experts_used": 3, "n_experts_shared": 1},
        **{"n_dense_layers": 1, "n_ff_dense": 768},
    },
}


def small(architecture: str = "llama", *, tied: bool = False, **other: int) -> Dimensions:
    """A shape of 256 columns, the least that all layouts take."""
    own = {
        "n_layers": 3,
        "n_embd": 256,
        "n_ff": 512,
        "n_heads": 4,
        "n_heads_kv": 4 if architecture in ("gpt2", "bloom") else 2,
        "n_embd_head": 64,
        "n_vocab": N_VOCAB,
        "n_ctx": 1024,
        **MIXTURES.get(architecture, {}),
        **other,
    }
    return Dimensions("small", architecture, tied=tied, **own)


def logits(path: Path, tokens: Sequence[int]) -> Logits:
    """The logits of a model after each of the tokens: (n_tokens, n_vocab)."""
    model = Model(path, n_gpu_layers=0)
    options = {"flash_attention": "off", "type_k": "f32", "type_v": "f32"}
    context = Context(model, ContextOptions(n_ctx=64, n_rows=len(tokens), n_threads=1, **options))
    try:
        return LlamaSession(context).score(tokens[:1], tokens[1:]).copy()
    finally:
        context.close()
        model.close()
