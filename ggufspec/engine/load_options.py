"""The options of `load`: each is declared once, for Python, the command line and the guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from ggufspec.common import defaults, validate
from ggufspec.common.validate import OneOf, Whole
from ggufspec.errors import OptionError
from ggufspec.models.adapters import Adapter, adapters_of
from ggufspec.models.head_facts import MTP
from ggufspec.models.heads import DraftFile
from ggufspec.models.key_overrides import (
    ROPE_SCALINGS,
    KeyOverride,
    Rope,
    key_overrides_of,
    rope_of,
)
from ggufspec.models.projectors import projector_beside
from ggufspec.placement.overrides import ALL, Overrides, overrides_of
from ggufspec.placement.rpc_address import Address, addresses

FIT: Final = "fit"  # n_ctx: as much as fits into free memory


class LoadOption(NamedTuple):
    """An option besides its name and type, which are those of its field in LoadOptions."""

    default: Any
    check: Callable[[str, Any], Any]  # returns the value of the field, or raises OptionError
    names: str  # on the command line, as cli.parameters.option reads them; "": only in Python
    help: str  # its end may say what the default means: "  [default: ...]"
    metavar: str | None = None
    flag: str = ""  # names of a flag that sets ALL
    section: str = "Devices and memory"  # of --help
    commands: str = "all"  # those that have it: "all", or a group that cli.load_options knows

    def checked(self, name: str, value: object) -> Any:
        """The value of the field; None stands for a default to be chosen. Raises OptionError."""
        is_chosen = value is None and self.default in (None, defaults.N_GPU_LAYERS)
        return None if is_chosen else self.check(name, value)


def _option(default: Any, check: Callable[[str, Any], Any], *about: str, **more: str) -> Any:
    made = LoadOption(default, check, *about, **more)
    return field(default=made.checked("", default), metadata={"option": made})


def _tensors(whose: str, names: str) -> Any:
    text = (
        f"Buffer type, such as CPU, for tensors of the {whose} whose names match a regular "
        "expression (without commas)."
    )
    return _option((), validate.texts, names, text, metavar="PATTERN=TYPE,...")


def _on_cpu(what: str, names: str, flag: str = "", end: str = "") -> Any:
    text = f"Keep {what} on the CPU, of the first N layers; -1: of all.{end}"
    return _option(None, Whole(ALL, 2048), names, text, flag=flag)


def _usual_text(name: str, value: object) -> tuple[int, ...]:
    found = validate.tokens(name, value)
    if len(found) != 2 or min(found) < 0:
        raise OptionError(
            f"{name} is {value!r}; give the tokens of the prompt and of the answer, such as "
            "(5000, 200)"
        )
    return found


_LAYERS = Whole(-(2**31) + 1, words={defaults.N_GPU_LAYERS: None, "all": ALL})
_THREADS = Whole(1, 512, {"auto": None, "-1": None})  # the limit is llama.cpp's
_FASTEST = "  [default: with -ngl auto, what is fastest]"
_FROM_FILE = "  [default: from the file]"
_ADAPTERS = "FILE[:SCALE],..."


@dataclass(frozen=True)
class LoadOptions:
    """The options of ggufspec.load; `of` checks them. None: to be chosen; negative layers: all."""

    target: Path
    draft: DraftFile | None = None
    # fmt: off
    n_ctx: int | None = _option(None, Whole(0), "-c --ctx-size $LLAMA_ARG_CTX_SIZE",
        "Context size: tokens of prompt and text together; 0: what the target was trained for.  "
        f"[default: that, at most {defaults.N_CTX}]")
    n_slots: int = _option(1, Whole(1, defaults.N_SLOTS_LIMIT),
        "--slots | -np --parallel $LLAMA_ARG_N_PARALLEL",
        "Number of texts generated at the same time in shared batches, and of conversations kept "
        "in the cache. Each takes the memory of a context (-c).", section="Server",
        commands="serve")
    n_gpu_layers: int | None = _option(defaults.N_GPU_LAYERS, _LAYERS,
        "-ngl --gpu-layers | --n-gpu-layers $LLAMA_ARG_N_GPU_LAYERS",
        "Layers of the target on GPUs: a number, all or auto. The output layer counts; -1: all; "
        "auto: the number with the best predicted speed that fits free memory.")
    n_gpu_layers_draft: int | None = _option(defaults.N_GPU_LAYERS, _LAYERS,
        "-ngld --gpu-layers-draft | --spec-draft-ngl --n-gpu-layers-draft"
        " $LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        "Layers of the draft on its GPU; values as for --gpu-layers. A head in the target's own "
        "file is where the target's last layers are.")
    override_tensor: tuple[str, ...] = _tensors("target",
        "-ot --override-tensor $LLAMA_ARG_OVERRIDE_TENSOR")
    n_cpu_moe: int | None = _on_cpu("experts of the target",
        "-ncmoe --n-cpu-moe $LLAMA_ARG_N_CPU_MOE", "-cmoe --cpu-moe", _FASTEST)
    n_cpu_ffn: int | None = _on_cpu("dense feed-forward matrices of the target",
        "-ncffn --n-cpu-ffn $LLAMA_ARG_N_CPU_FFN", end=_FASTEST)
    override_tensor_draft: tuple[str, ...] = _tensors("draft",
        "-otd --override-tensor-draft | --spec-draft-override-tensor")
    n_cpu_moe_draft: int | None = _on_cpu("experts of the draft",
        "-ncmoed --n-cpu-moe-draft | --spec-draft-n-cpu-moe --spec-draft-ncmoe"
        " $LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE", "-cmoed --cpu-moe-draft | --spec-draft-cpu-moe")
    n_cpu_ffn_draft: int | None = _on_cpu("dense feed-forward matrices of the draft",
        "-ncffnd --n-cpu-ffn-draft")
    tensor_split: tuple[float, ...] = _option((), validate.shares,
        "-ts --tensor-split $LLAMA_ARG_TENSOR_SPLIT",
        "Proportions of the target's layers per GPU, such as 3,1.  [default: by free memory]",
        metavar="N,N...")
    main_gpu: int | None = _option(None, Whole(0), "-mg --main-gpu $LLAMA_ARG_MAIN_GPU",
        "GPU for the draft.  [default: the one with the best predicted speed]")
    rpc: tuple[Address, ...] = _option((), addresses, "--rpc $LLAMA_ARG_RPC",
        "llama.cpp RPC servers that compute layers of the target, like GPUs. They have no "
        "authentication: use them only in a network that you trust.", metavar="HOST:PORT,...")
    n_threads: int | None = _option(None, _THREADS, "-t --threads $LLAMA_ARG_THREADS",
        "Threads for the target. auto: one per core, or what tune found; fewer while other "
        "programs use the cores.  [default: auto]")
    n_threads_draft: int | None = _option(None, _THREADS,
        "-td --threads-draft | --spec-draft-threads",
        "Threads for the draft. auto: as the target, or what tune found; 1 for a tiny draft.  "
        "[default: auto]")
    n_ctx_draft: int | None = _option(None, Whole(1), "-cd --ctx-size-draft",
        "Context size of a draft model, to save memory: it reads only the first and the newest "
        "tokens of a longer text.  [default: the target's]")
    n_batch: int | None = _option(None, Whole(1, 2**20), "-b --batch-size $LLAMA_ARG_BATCH",
        "Prompt tokens per batch, for target and draft.  "
        f"[default: from tune, or {defaults.N_BATCH}]")
    n_draft_max: int = _option(defaults.N_DRAFT_MAX, Whole(1, defaults.N_DRAFT_LIMIT),
        "--draft-max | --spec-draft-n-max $LLAMA_ARG_SPEC_DRAFT_N_MAX",
        "Maximum drafted tokens per round; with a number in --draft-n, that.", section="Drafting",
        commands="texts")
    flash_attention: str = _option(defaults.FLASH_ATTENTION, OneOf(("auto", "own", "on", "off")),
        "-fa --flash-attn $LLAMA_ARG_FLASH_ATTN",
        "Flash attention; own: by ggufspec's kernels for CPUs; on: by llama.cpp's; auto: the "
        "fastest on CPUs for the lengths of prompt and answer, measured once, else llama.cpp's "
        "choice.")
    usual_text: tuple[int, ...] | None = _option(None, _usual_text, "",
        "Tokens of prompt and answer, such as (5000, 200), that flash attention is chosen for.  "
        "[default: a short text]")
    type_k: str = _option(defaults.KV_TYPE, OneOf(defaults.KV_TYPES),
        "-ctk --cache-type-k $LLAMA_ARG_CACHE_TYPE_K",
        f"Type of the K cache: {', '.join(defaults.KV_TYPES)}.", metavar="TYPE")
    type_v: str = _option(defaults.KV_TYPE, OneOf(defaults.KV_TYPES),
        "-ctv --cache-type-v $LLAMA_ARG_CACHE_TYPE_V",
        "Type of the V cache, as for --cache-type-k.", metavar="TYPE")
    exact: bool = _option(False, validate.switch, "--exact",
        "Require that greedy text is identical with and without drafts, and whatever else is "
        "written; refused where that does not hold.")
    mmap: bool = _option(True, validate.switch, "--mmap/--no-mmap", "Memory-map the model files.")
    mlock: bool = _option(False, validate.switch, "--mlock",
        "Keep the models in RAM, as far as ulimit -l allows.")
    repack: bool = _option(True, validate.switch, "--repack/--no-repack $LLAMA_ARG_REPACK",
        "Let ggufspec's and llama.cpp's kernels rearrange weights in memory.")
    op_offload: bool | None = _option(None, validate.switch, "--op-offload/--no-op-offload",
        "Compute layers that are on the host on a GPU while reading prompts.  [default: if that is "
        "faster]")
    override_kv: tuple[KeyOverride, ...] = _option((), key_overrides_of, "--override-kv",
        "Replace values of the target's header; TYPE is int, float, bool or str.",
        metavar="KEY=TYPE:VALUE,...")
    rope_scaling: str | None = _option(None, OneOf(ROPE_SCALINGS),
        "--rope-scaling $LLAMA_ARG_ROPE_SCALING_TYPE",
        "Scaling of positions, for a context longer than in training.  [default: from the file, or "
        "linear]")
    rope_scale: float | None = _option(None, validate.positive,
        "--rope-scale $LLAMA_ARG_ROPE_SCALE", f"Factor by which the context grows.{_FROM_FILE}")
    rope_freq_base: float | None = _option(None, validate.positive,
        "--rope-freq-base $LLAMA_ARG_ROPE_FREQ_BASE", f"Base frequency of positions.{_FROM_FILE}")
    rope_freq_scale: float | None = _option(None, validate.positive,
        "--rope-freq-scale $LLAMA_ARG_ROPE_FREQ_SCALE", f"1 / --rope-scale.{_FROM_FILE}")
    yarn_orig_ctx: int | None = _option(None, Whole(1), "--yarn-orig-ctx $LLAMA_ARG_YARN_ORIG_CTX",
        f"Context size in training, for yarn.{_FROM_FILE}")
    tuned: bool = _option(True, validate.switch, "",
        "Use what `ggufspec tune` stored, or else measure flash attention; store measured costs.")
    lora: tuple[Adapter, ...] = _option((), adapters_of, "--lora | --lora-scaled",
        "LoRA adapters (GGUF) of the target, each with the factor of its weights; may be given "
        "several times.  [default of SCALE: 1]", metavar=_ADAPTERS, section="Models")
    lora_draft: tuple[Adapter, ...] = _option((), adapters_of, "--lora-draft",
        "LoRA adapters of a draft model, as for --lora.", metavar=_ADAPTERS, section="Models")
    mmproj: Path | None = _option(None, validate.path, "-mm --mmproj $LLAMA_ARG_MMPROJ",  # noqa: RUF009
        "Projector (GGUF) of the target, which then reads images.  [default: a file with mmproj in "
        "its name beside the target]", metavar="FILE", section="Models", commands="chats")
    mmproj_auto: bool = _option(True, validate.switch,
        "--mmproj-auto/--no-mmproj $LLAMA_ARG_MMPROJ_AUTO",
        "Use a projector that lies beside the target.", section="Models", commands="chats")
    chat_template: str | None = _option(None, validate.text,
        "--chat-template-file | --chat-template $LLAMA_ARG_CHAT_TEMPLATE_FILE",
        "Chat template (Jinja) to use instead of the target's own.", metavar="FILE",
        section="Prompt", commands="chats")
    template_variables: Mapping[str, object] | None = _option(None, validate.variables,
        "--chat-template-kwargs $LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        'Variables of the chat template, such as {"enable_thinking": false}; those of a request '
        "take precedence.", metavar="JSON", section="Prompt", commands="chats")
    draft_texts: tuple[Path, ...] = _option((), validate.paths, "--draft-text",
        "A text that answers may repeat, such as a file of the code that is edited; may be given "
        "several times. Tokens are drafted from it; it does not change the answers.",
        section="Drafting", commands="texts")
    n_remembered: int = _option(defaults.N_REMEMBERED, Whole(0), "--remember",
        "Draft from the latest N tokens of earlier texts; 0: none. A client can then guess from "
        "its speed what other clients' texts contain.", metavar="TOKENS", section="Drafting",
        commands="serve")
    cache_ram: int | None = _option(None, Whole(0, 2**30), "-cram --cache-ram $LLAMA_ARG_CACHE_RAM",
        "MiB of memory to keep conversations that lost their slot, so that their next turn reads "
        "only what is new; 0: none.  [default: a quarter of the free memory, at most "
        f"{defaults.CACHE_RAM:,}]", metavar="MIB", commands="serve")
    ctx_checkpoints: int = _option(defaults.CTX_CHECKPOINTS, Whole(0, 1024),
        "-ctxcp --ctx-checkpoints | --swa-checkpoints $LLAMA_ARG_CTX_CHECKPOINTS",
        "For models with recurrent layers: number of states kept at ends of messages, so that a "
        "turn without the earlier reasoning reads only what is new.", commands="serve")

    # fmt: on
    # What follows from these, or is chosen by Fit.
    n_ctx_usual: int | None = defaults.N_CTX  # upper bound if n_ctx is None; None: what fits
    overrides: Overrides | None = None  # of the target's tensors
    overrides_draft: Overrides | None = None
    override_kv_draft: tuple[KeyOverride, ...] = ()  # in the target's, Fit adds those of `rope`
    n_rollback: int = 0  # of the target's context
    offloads: bool = True  # see ContextOptions
    placement: str | None = None  # one line that tells the user what was chosen; None: nothing was

    @staticmethod
    def of(target: object, draft: object, asked: Mapping[str, Any]) -> LoadOptions:
        """Raises OptionError for a value that cannot be used, TypeError for an unknown option."""
        given = dict(asked)
        for name in sorted(given.keys() - OPTIONS.keys()):
            near = "".join(f"; do you mean {each}?" for each in get_close_matches(name, OPTIONS, 1))
            raise TypeError(f"load() has no option {name!r}{near}")
        if fits := given.get("n_ctx") == FIT:
            given["n_ctx"] = None
        if given.get("n_draft_max") is None:
            given["n_draft_max"] = defaults.N_DRAFT_MAX
        checked = {name: OPTIONS[name].checked(name, value) for name, value in given.items()}
        made = LoadOptions(
            validate.path("target", target),
            MTP if draft == MTP else None if draft is None else validate.path("draft", draft),
            **checked,
        )
        return replace(
            made,
            n_ctx_usual=None if fits else defaults.N_CTX,
            overrides=overrides_of("", made.override_tensor, made.n_cpu_moe, made.n_cpu_ffn),
            overrides_draft=overrides_of(
                "_draft", made.override_tensor_draft, made.n_cpu_moe_draft, made.n_cpu_ffn_draft
            ),
        )

    @property
    def projector(self) -> Path | None:
        """The file of the projector to load."""
        return self.mmproj or (projector_beside(self.target) if self.mmproj_auto else None)

    @property
    def rope(self) -> Rope:
        """How positions are scaled. Raises OptionError if options contradict each other."""
        factors = (self.rope_scale, self.rope_freq_base, self.rope_freq_scale)
        return rope_of(self.rope_scaling, *factors, self.yarn_orig_ctx)


OPTIONS: Final[Mapping[str, LoadOption]] = {
    each.name: each.metadata["option"] for each in fields(LoadOptions) if each.metadata
}
