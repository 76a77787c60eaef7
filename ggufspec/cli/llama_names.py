"""Maps our options to llama.cpp's names and environment variables with the same meaning."""

from __future__ import annotations

import os

import click
from click.core import ParameterSource

# Keys: the last name of our option. --help and errors do not show these aliases.
_ALIASES = {
    "--target": ("--model",),
    "--draft": ("--spec-draft-model", "--model-draft"),
    "--n-predict": ("--predict",),
    "--threads-draft": ("--spec-draft-threads",),
    "--gpu-layers": ("--n-gpu-layers",),
    "--gpu-layers-draft": ("--spec-draft-ngl", "--n-gpu-layers-draft"),
    "--override-tensor-draft": ("--spec-draft-override-tensor",),
    "--cpu-moe-draft": ("--spec-draft-cpu-moe",),
    "--n-cpu-moe-draft": ("--spec-draft-n-cpu-moe", "--spec-draft-ncmoe"),
    "--temp": ("--temperature",),
    "--system": ("--system-prompt",),
    "--stop": ("-r", "--reverse-prompt"),
    "--color": ("-co",),
    "--verbose": ("--log-verbose",),
    "--alias": ("-a",),
    "--timeout": ("-to",),
    "--slots": ("-np", "--parallel"),
    "--ctx-checkpoints": ("--swa-checkpoints",),
}
VARIABLES = {
    "--target": "LLAMA_ARG_MODEL",
    "--draft": "LLAMA_ARG_SPEC_DRAFT_MODEL",
    "--offline": "LLAMA_ARG_OFFLINE",
    "--ctx-size": "LLAMA_ARG_CTX_SIZE",
    "--n-predict": "LLAMA_ARG_N_PREDICT",
    "--batch-size": "LLAMA_ARG_BATCH",
    "--threads": "LLAMA_ARG_THREADS",
    "--gpu-layers": "LLAMA_ARG_N_GPU_LAYERS",
    "--gpu-layers-draft": "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    "--override-tensor": "LLAMA_ARG_OVERRIDE_TENSOR",
    "--n-cpu-moe": "LLAMA_ARG_N_CPU_MOE",
    "--n-cpu-moe-draft": "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
    "--n-cpu-ffn": "LLAMA_ARG_N_CPU_FFN",
    "--tensor-split": "LLAMA_ARG_TENSOR_SPLIT",
    "--main-gpu": "LLAMA_ARG_MAIN_GPU",
    "--rpc": "LLAMA_ARG_RPC",
    "--flash-attn": "LLAMA_ARG_FLASH_ATTN",
    "--cache-type-k": "LLAMA_ARG_CACHE_TYPE_K",
    "--cache-type-v": "LLAMA_ARG_CACHE_TYPE_V",
    "--repack": "LLAMA_ARG_REPACK",
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--rope-scale": "LLAMA_ARG_ROPE_SCALE",
    "--rope-freq-base": "LLAMA_ARG_ROPE_FREQ_BASE",
    "--rope-freq-scale": "LLAMA_ARG_ROPE_FREQ_SCALE",
    "--yarn-orig-ctx": "LLAMA_ARG_YARN_ORIG_CTX",
    "--context-shift": "LLAMA_ARG_CONTEXT_SHIFT",
    "--cache-ram": "LLAMA_ARG_CACHE_RAM",
    "--ctx-checkpoints": "LLAMA_ARG_CTX_CHECKPOINTS",
    "--temp": "LLAMA_ARG_TEMPERATURE",
    "--top-k": "LLAMA_ARG_TOP_K",
    "--top-p": "LLAMA_ARG_TOP_P",
    "--min-p": "LLAMA_ARG_MIN_P",
    "--repeat-penalty": "LLAMA_ARG_REPEAT_PENALTY",
    "--presence-penalty": "LLAMA_ARG_PRESENCE_PENALTY",
    "--frequency-penalty": "LLAMA_ARG_FREQUENCY_PENALTY",
    "--chat-template-file": "LLAMA_ARG_CHAT_TEMPLATE_FILE",
    "--slots": "LLAMA_ARG_N_PARALLEL",
    "--host": "LLAMA_ARG_HOST",
    "--port": "LLAMA_ARG_PORT",
    "--alias": "LLAMA_ARG_ALIAS",
    "--api-key": "LLAMA_API_KEY",
    "--api-key-file": "LLAMA_ARG_API_KEY_FILE",
}


class Option(click.Option):
    """An option that also has llama.cpp's names and variable; its own variable has priority."""

    def __init__(self, param_decls: list[str], **settings: object) -> None:
        names = [name for name in param_decls if name.startswith("-")]
        key = names[-1].partition("/")[0]
        self.aliases = [name for name in _ALIASES.get(key, ()) if name not in names]
        if self.aliases and len(names) == len(param_decls):  # else an alias would become its name
            param_decls = [*param_decls, key.lstrip("-").replace("-", "_")]
        own = settings.pop("envvar", None)
        found = [each for each in (own, VARIABLES.get(key)) if isinstance(each, str)]
        super().__init__([*self.aliases, *param_decls], envvar=found or None, **settings)  # type: ignore[arg-type]

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        found = super().get_help_record(ctx)
        if found is None:
            return None
        names, text = found
        for alias in self.aliases:
            names = names.replace(f"{alias}, ", "")
        return names, text

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The option's names, and the environment variable if the value came from it."""
        hint = " / ".join(f"'{name}'" for name in self.opts if name not in self.aliases)
        source = ctx and self.name and ctx.get_parameter_source(self.name)
        if source != ParameterSource.ENVIRONMENT:
            return hint
        names = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        return f"{hint} ({next(name for name in names if os.environ.get(name))})"
