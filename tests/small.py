"""Small models of each architecture, for stand-ins that take milliseconds."""

from __future__ import annotations

from ggufspec.models.registry import Dimensions

N_VOCAB = 2048


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
        **({"n_experts": 8, "n_experts_used": 2} if architecture == "qwen3moe" else {}),
        **other,
    }
    return Dimensions("small", architecture, vocabulary="words", tied=tied, **own)
