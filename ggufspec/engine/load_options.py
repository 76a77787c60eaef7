"""The options of `load`: default and check of each, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ggufspec.common import defaults, validate
from ggufspec.common.option_fields import Option, option, options_of
from ggufspec.common.validate import POSITIVE, OneOf, Whole
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


def _usual_text(name: str, value: object) -> tuple[int, ...]:
    found = validate.tokens(name, value)
    if len(found) != 2 or min(found) < 0:
        raise OptionError(
            f"{name} is {value!r}; give the tokens of the prompt and of the answer, such as "
            "(5000, 200)"
        )
    return found


_LAYERS = Whole(-(2**31) + 1, words={defaults.N_GPU_LAYERS: None, "all": ALL})
_ON_CPU = Whole(ALL, 2048)
_THREADS = Whole(1, 512, {"auto": None, "-1": None})  # the limit is llama.cpp's
_CACHE_TYPE = OneOf(defaults.KV_TYPES)


@dataclass(frozen=True)
class LoadOptions:
    """The options of ggufspec.load; `of` checks them. None: to be chosen; negative layers: all.

    cli/options.toml says what each does, and how it is named on the command line.
    """

    target: Path
    draft: DraftFile | None = None
    n_ctx: int | None = option(None, Whole(0))
    n_slots: int = option(1, Whole(1, defaults.N_SLOTS_LIMIT))
    n_gpu_layers: int | None = option(defaults.N_GPU_LAYERS, _LAYERS)
    n_gpu_layers_draft: int | None = option(defaults.N_GPU_LAYERS, _LAYERS)
    override_tensor: tuple[str, ...] = option((), validate.texts)
    n_cpu_moe: int | None = option(None, _ON_CPU)
    n_cpu_ffn: int | None = option(None, _ON_CPU)
    override_tensor_draft: tuple[str, ...] = option((), validate.texts)
    n_cpu_moe_draft: int | None = option(None, _ON_CPU)
    n_cpu_ffn_draft: int | None = option(None, _ON_CPU)
    tensor_split: tuple[float, ...] = option((), validate.shares)
    main_gpu: int | None = option(None, Whole(0))
    rpc: tuple[Address, ...] = option((), addresses)
    n_threads: int | None = option(None, _THREADS)
    n_threads_draft: int | None = option(None, _THREADS)
    n_ctx_draft: int | None = option(None, Whole(1))
    n_batch: int | None = option(None, Whole(1, 2**20))
    n_draft_max: int = option(defaults.N_DRAFT_MAX, Whole(1, defaults.N_DRAFT_LIMIT))
    flash_attention: str = option(defaults.FLASH_ATTENTION, OneOf(("auto", "own", "on", "off")))
    usual_text: tuple[int, ...] | None = option(None, _usual_text)
    type_k: str = option(defaults.KV_TYPE, _CACHE_TYPE)
    type_v: str = option(defaults.KV_TYPE, _CACHE_TYPE)
    exact: bool = option(False, validate.switch)
    mmap: bool = option(True, validate.switch)
    mlock: bool = option(False, validate.switch)
    repack: bool = option(True, validate.switch)
    op_offload: bool | None = option(None, validate.switch)
    override_kv: tuple[KeyOverride, ...] = option((), key_overrides_of)
    rope_scaling: str | None = option(None, OneOf(ROPE_SCALINGS))
    rope_scale: float | None = option(None, POSITIVE)
    rope_freq_base: float | None = option(None, POSITIVE)
    rope_freq_scale: float | None = option(None, POSITIVE)
    yarn_orig_ctx: int | None = option(None, Whole(1))
    tuned: bool = option(True, validate.switch)
    lora: tuple[Adapter, ...] = option((), adapters_of)
    lora_draft: tuple[Adapter, ...] = option((), adapters_of)
    mmproj: Path | None = option(None, validate.path)  # noqa: RUF009
    mmproj_draft: Path | None = option(None, validate.path)  # noqa: RUF009
    mmproj_auto: bool = option(True, validate.switch)
    chat_template: str | None = option(None, validate.text)
    template_variables: Mapping[str, object] | None = option(None, validate.variables)
    draft_texts: tuple[Path, ...] = option((), validate.paths)
    n_remembered: int = option(defaults.N_REMEMBERED, Whole(0))
    cache_ram: int | None = option(None, Whole(0, 2**30))
    ctx_checkpoints: int = option(defaults.CTX_CHECKPOINTS, Whole(0, 1024))
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
    def projector_draft(self) -> Path | None:
        """The file of the projector to load for the draft, if that is a model."""
        if self.mmproj_draft is not None or not self.mmproj_auto or not self.projector:
            return self.mmproj_draft
        return projector_beside(self.draft) if isinstance(self.draft, Path) else None

    @property
    def rope(self) -> Rope:
        """How positions are scaled. Raises OptionError if options contradict each other."""
        factors = (self.rope_scale, self.rope_freq_base, self.rope_freq_scale)
        return rope_of(self.rope_scaling, *factors, self.yarn_orig_ctx)


OPTIONS: Final[Mapping[str, Option]] = options_of(LoadOptions)
