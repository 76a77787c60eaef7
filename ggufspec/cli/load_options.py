"""Options for loading models, with llama.cpp's names if it has the option."""

from __future__ import annotations

import os

import click

from ggufspec.cli.parameters import (
    AT_LEAST_1,
    COUNT,
    POSITIVE,
    THREADS,
    Option,
    OrWord,
    gathered,
    option,
)
from ggufspec.common import defaults

_LAYERS = click.IntRange(min=defaults.ALL_LAYERS)
_GPU_LAYERS = OrWord(click.INT, {"auto": "auto", "all": defaults.ALL_LAYERS})


def _parts(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (value or "").split(",")))


def context_option_of(default: str) -> Option:
    return option(
        "-c --ctx-size n_ctx",
        "Context size: tokens of prompt and text together; 0: what the target was trained for.  "
        f"[default: that, {default}]",
        type=COUNT,
    )


context_option = context_option_of(f"at most {defaults.N_CTX}")


def _override_options(end: str, short: str, whose: str) -> tuple[Option, ...]:
    """Options that place tensors of a model apart from their layer; `whose`: target or draft."""
    in_name = end.replace("-", "_")
    return (
        option(
            f"-ot{short} --override-tensor{end} override_tensor{in_name}",
            f"Buffer type, such as CPU, for tensors of the {whose} whose names match a regular "
            "expression (without commas).",
            metavar="PATTERN=TYPE,...",
            callback=_parts,
        ),
        option(
            f"-cmoe{short} --cpu-moe{end} n_cpu_moe{in_name}",
            f"Keep the experts of all layers of the {whose} on the CPU.",
            flag_value=defaults.ALL_LAYERS,
            type=_LAYERS,
        ),
        option(
            f"-ncmoe{short} --n-cpu-moe{end} n_cpu_moe{in_name}",
            f"Keep the experts of the first N layers of the {whose} on the CPU; -1: of all."
            + ("" if end else "  [default: with -ngl auto, what is fastest]"),
            type=_LAYERS,
        ),
        option(
            f"-ncffn{short} --n-cpu-ffn{end} n_cpu_ffn{in_name}",
            f"Keep dense feed-forward matrices of the first N layers of the {whose} on the CPU.",
            type=_LAYERS,
        ),
    )


def _lora_option(end: str, short: str, whose: str) -> Option:
    return option(
        f"{short}--lora{end} lora{end.replace('-', '_')}",
        f"LoRA adapters (GGUF) of the {whose}, each with the factor of its weights; may be given "
        "several times.  [default of SCALE: 1]",
        metavar="FILE[:SCALE],...",
        multiple=True,
        callback=lambda context, option, given: _adapters(given),
    )


LOAD = (
    _lora_option("", "--lora-scaled ", "target"),  # llama.cpp has a name for each form
    _lora_option("-draft", "", "draft"),
    option(
        "-cd --ctx-size-draft n_ctx_draft",
        "Context size of a draft model, to save memory: it reads only the first and the newest "
        "tokens of a longer text.  [default: the target's]",
        type=AT_LEAST_1,
    ),
    option(
        "-b --batch-size n_batch",
        "Prompt tokens per batch, for target and draft.  [default: from tune, or "
        f"{defaults.N_BATCH}]",
        type=AT_LEAST_1,
    ),
    option(
        "-t --threads n_threads",
        "Threads for the target. auto: one per core, or what tune found; fewer while other "
        "programs use the cores.  [default: auto]",
        type=THREADS,
    ),
    option(
        "-td --threads-draft n_threads_draft",
        "Threads for the draft. auto: as the target, or what tune found; 1 for a tiny draft.  "
        "[default: auto]",
        type=THREADS,
    ),
    option(
        "-ngl --gpu-layers n_gpu_layers",
        "Layers of the target on GPUs, counting the output layer; -1 or all: all; auto: the number "
        "with the best predicted speed that fits free memory.",
        type=_GPU_LAYERS,
        default=defaults.N_GPU_LAYERS,
    ),
    option(
        "-ngld --gpu-layers-draft n_gpu_layers_draft",
        "Layers of the draft on its GPU; values as for --gpu-layers.",
        type=_GPU_LAYERS,
        default=defaults.N_GPU_LAYERS,
    ),
    *_override_options("", "", "target"),
    *_override_options("-draft", "d", "draft"),
    option(
        "-ts --tensor-split tensor_split",
        "Proportions of the target's layers per GPU, such as 3,1.  [default: by free memory]",
        metavar="N,N...",
        callback=lambda context, option, value: _shares(value),
    ),
    option(
        "-mg --main-gpu main_gpu",
        "GPU for the draft.  [default: the one with the best predicted speed]",
        type=COUNT,
    ),
    option(
        "--rpc rpc",
        "llama.cpp RPC servers that compute layers of the target, like GPUs. They have no "
        "authentication: use them only in a network that you trust.",
        metavar="HOST:PORT,...",
        callback=lambda context, option, value: _servers(value),
    ),
    option(
        "-fa --flash-attn flash_attention",
        "Flash attention; auto: the faster choice on CPUs for the lengths of prompt and answer, "
        "measured once, else llama.cpp's.",
        type=click.Choice(["auto", "on", "off"]),
        default=defaults.FLASH_ATTENTION,
    ),
    *(
        option(
            f"-ct{name} --cache-type-{name} type_{name}",
            f"Type of the {name.upper()} cache: {', '.join(defaults.KV_TYPES)}.",
            type=click.Choice(defaults.KV_TYPES),
            metavar="TYPE",
            default=defaults.KV_TYPE,
        )
        for name in "kv"
    ),
    option(
        "--exact",
        "Use passes of one size (--draft-n or 3, plus 1), so that greedy text is identical with "
        "and without drafts, and in shared batches. Slower if drafts are rejected.",
        is_flag=True,
    ),
    option("--mmap/--no-mmap", "Memory-map the model files.", default=True),
    option("--mlock", "Keep the models in RAM, as far as ulimit -l allows.", is_flag=True),
    option(
        "--repack/--no-repack",
        "Let ggufspec's and llama.cpp's kernels rearrange weights in memory.",
        default=True,
    ),
    option(
        "--op-offload/--no-op-offload",
        "Compute layers that are on the host on a GPU while reading prompts.  [default: if that is "
        "faster]",
        default=None,
    ),
    option(
        "--override-kv",
        "Replace values of the target's header; TYPE is int, float, bool or str.",
        metavar="KEY=TYPE:VALUE,...",
        callback=_parts,
    ),
    option(
        "--rope-scaling",
        "Scaling of positions, for a context longer than in training.  [default: from the file, or "
        "linear]",
        type=click.Choice(("none", "linear", "yarn")),
    ),
    option("--rope-scale", "Factor by which the context grows.", type=POSITIVE),
    option("--rope-freq-base", "Base frequency of positions.", type=POSITIVE),
    option("--rope-freq-scale", "1 / --rope-scale.", type=POSITIVE),
    option(
        "--yarn-orig-ctx",
        "Context size in training, for yarn.  [default: from the file]",
        type=AT_LEAST_1,
    ),
)
load_options = gathered("load_settings", context_option, *LOAD)


def _adapters(given: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Pairs of path and scale from (a.gguf, b.gguf:0.5); paths may contain other colons."""
    found = []
    for text in filter(None, ",".join(given).split(",")):
        file, _, scale = text.rpartition(":")
        try:
            path, factor = (file, float(scale)) if file else (text, 1.0)
        except ValueError:
            path, factor = text, 1.0
        found.append((os.path.abspath(path), factor))
    return tuple(found)


def _shares(value: str | None) -> tuple[float, ...]:
    if not value:
        return ()
    from ggufspec.common import validate

    try:
        return validate.shares("it", [float(part) for part in value.split(",")])
    except ValueError as error:  # OptionError is a ValueError
        raise click.BadParameter(f"{value!r} is not a list of proportions such as 3,1") from error


def _servers(value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    from ggufspec.placement import rpc_address

    return tuple(map(str, rpc_address.addresses("--rpc", value.split(","))))
