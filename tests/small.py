"""Small models of each architecture, for stand-ins that take milliseconds."""

from __future__ import annotations

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
