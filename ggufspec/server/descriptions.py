"""Describes the model and the default options to clients, as other servers do."""

from __future__ import annotations

import math
from typing import Any

from ggufspec.decoding.sampling_options import SAMPLING
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.server.dialects.chat_response import FINGERPRINT
from ggufspec.server.options import ServerOptions
from ggufspec.server.requests import default_options


def model(engine: Engine, options: ServerOptions, started_at: int) -> dict[str, Any]:
    """The model, in OpenAI's form."""
    return {
        "id": options.alias,
        "object": "model",
        "created": started_at,
        "owned_by": "ggufspec",
        "max_model_len": engine.n_ctx,  # vLLM's name
        "ggufspec": {
            "chat": engine.chat_template is not None,
            "draft": engine.pair.draft is not None,
            "n_ctx": engine.n_ctx,
            "n_vocab": engine.vocab.n_tokens,
        },
    }


def tokenizer(engine: Engine) -> dict[str, Any]:
    """The response to `/tokenizer_info`, in the form of vLLM's server."""
    vocab, template = engine.vocab, engine.chat_template
    return {
        "bos_token": vocab.special_text(vocab.bos),
        "eos_token": vocab.special_text(vocab.eos),
        "chat_template": None if template is None else template.source,
    }


def properties(engine: Engine, options: ServerOptions) -> dict[str, Any]:
    """The response to `/props`, as in llama.cpp's server, but with file names instead of paths."""
    texts = tokenizer(engine)
    defaults = CheckedOptions.of(default_options(engine, options))
    sampling = defaults.sampling
    params = {name: getattr(sampling, name) for name in SAMPLING}
    params["logit_bias"] = [
        [token, False if bias == -math.inf else bias] for token, bias in sampling.logit_bias.items()
    ]
    params |= {"seed": defaults.seed, "max_tokens": options.max_tokens}
    params |= {"drafter": defaults.drafter, "tree": defaults.tree, "verify": defaults.verify}
    return {
        "default_generation_settings": {
            "n_ctx": engine.n_ctx,
            "params": params | {"draft_n": defaults.n_draft},
        },
        "total_slots": engine.n_slots,
        "model_alias": options.alias,
        "model_path": engine.pair.target.model.path.name,
        **texts,
        "chat_template": texts["chat_template"] or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": FINGERPRINT,
    }
