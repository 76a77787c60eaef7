"""Recognises draft heads by their headers, and refuses heads that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ggufspec.common.facts import counted
from ggufspec.errors import ModelError
from ggufspec.models.head_facts import (
    ASSISTANT,
    DFLASH,
    EAGLE3,
    KINDS,
    MTP,
    HeadFacts,
    architectures,
    check_tokens,
    damaged,
    dflash,
    eagle3,
    kind_of,
    misfit,
)
from ggufspec.models.header import Header, read_header

DraftFile = Path | Literal["mtp"]

_TARGET_OF_ASSISTANT = "gemma4"
_OTHERS = {  # by general.type
    "adapter": "a LoRA adapter, not a model: name it with --lora (in Python lora=[...]), and as "
    "the model the one that it was made for",
    "mmproj": "a projector for images or sound, not a model: name the model that it was made for",
    "imatrix": "an importance matrix for quantization, not a model: name a model",
}


def head_of(target: Header, draft: Header | None) -> HeadFacts | None:
    """The head in the draft's file or, without a draft, in the target's file; None: there is none.

    A whole model with MTP layers, named as a draft, is an ordinary draft. Raises ModelError and
    VocabError for a head that does not fit the target, or that llama.cpp does not run.
    """
    if draft is None:
        return None if _why_no_mtp(target) else HeadFacts("mtp", target.n_mtp_layers)
    if not is_head(draft):
        return None
    _check_rotation(draft)
    checks = {EAGLE3: eagle3, DFLASH: dflash, ASSISTANT: _assistant}
    return checks.get(draft.architecture, _sidecar)(target, draft)


def read_draft(target: Header, draft: DraftFile) -> tuple[Header | None, HeadFacts | None]:
    """The header of a draft's file and a head's facts; each may be None. Raises as `head_of`."""
    if draft == MTP:
        if why := _why_no_mtp(target):
            raise ModelError(
                f"{target.paths[0]} {why}. Name a file with an MTP head for this model (often "
                "mtp-*.gguf), or another draft; `--draft auto` looks for one"
            )
        return None, head_of(target, None)
    header = read_header(draft)
    return header, head_of(target, header)


def is_head(header: Header) -> bool:
    """Whether a file is a draft head only. Raises ModelError as `check_type`."""
    check_type(header)
    return is_mtp_alone(header) or header.architecture in KINDS


def check_type(header: Header) -> None:
    """Raise ModelError for a file that is neither a model nor a head, but goes with one."""
    if what := _OTHERS.get(str(header.values.get("general.type"))):
        raise ModelError(f"{header.paths[0]} is {what}")


def is_mtp_alone(header: Header) -> bool:
    has_others = "blk.0.attn_norm.weight" in header.tensor_names and header.mtp_layers.start > 0
    return header.n_mtp_layers > 0 and not has_others


def check_model(header: Header) -> None:
    """Raise ModelError for a draft head or an adapter, which cannot write text by itself."""
    if is_head(header):
        raise ModelError(
            f"{header.paths[0]} is {kind_of(header)}, not a model: name it as the draft (--draft), "
            "and name the model that it was made for as the target"
        )


def head_text(header: Header) -> str:
    """Describes, for `models show`, the head that a file is or contains; empty without one."""
    if header.architecture == EAGLE3:
        layers = ", ".join(map(str, header.values.get("eagle3.target_layers") or ["unknown"]))
        width = header.number("target_hidden_size", 0)
        return f"is an EAGLE-3 head for models of width {width}, layers {layers}"
    if header.architecture == DFLASH:
        n, width = header.number("block_size", 0), header.number("embedding_length", 0)
        return f"is {kind_of(header)} for models of width {width}, blocks of {n} tokens"
    if header.architecture == ASSISTANT:
        width = header.number("embedding_length_out", 0)
        return f"is a Gemma 4 assistant (an MTP head) for models of width {width}"
    if is_head(header):
        return f"is {kind_of(header)} without a model"
    if _why_no_mtp(header):
        return ""
    n_bytes = sum(tensor.n_bytes for tensor in header.mtp_tensors)
    return f"has an MTP head ({counted(header.n_mtp_layers, 'layer')}, {n_bytes / 1e6:,.0f} MB)"


def _why_no_mtp(header: Header) -> str:
    """Why the MTP head of a file cannot be used; empty: it can."""
    n, of = header.n_mtp_layers, header.architecture
    needed = {f"blk.{i}.nextn.eh_proj.weight" for i in header.mtp_layers}
    if not n or not needed <= header.tensor_names:
        return "has no MTP head (its conversion left it out, or the model has none)"
    if of not in architectures()["mtp"]:
        return f"has an MTP head, but llama.cpp runs none of the architecture {of}"
    if n > 1 and of not in architectures()["several_layers"]:
        return f"has an MTP head of {n} layers; llama.cpp runs one of 1 layer for {of}"
    names = architectures()["asserted"].get(of, ())
    asserted = {f"blk.{i}.{name}.weight" for i in header.mtp_layers for name in names}
    if missing := sorted(asserted - header.tensor_names):
        return f"has an MTP head without {missing[0]}, which llama.cpp needs for {of}"
    return ""


def _check_rotation(draft: Header) -> None:
    """Raise ModelError for a number of rotated dimensions at which llama.cpp ends the process."""
    n_heads = max([1, *draft.numbers("attention.head_count", 1)])
    length = draft.number("embedding_length") // n_heads
    for kind in ("", "_swa"):  # the keys of layers with a window default to the other layers'
        length = draft.number(f"attention.key_length{kind}", length)
        n_rot = draft.number(f"rope.dimension_count{kind}", length)
        if n_rot % 2 or not 0 < n_rot <= length:
            raise damaged(draft, f"its heads rotate {n_rot} dimensions of {length}")


def _sidecar(target: Header, draft: Header) -> HeadFacts:
    if draft.architecture != target.architecture:
        raise misfit(
            draft,
            f"of the architecture {draft.architecture}, and the target of {target.architecture}",
        )
    if why := _why_no_mtp(draft):
        raise ModelError(f"{draft.paths[0]} {why}. Use another draft")
    width, wanted = draft.number("embedding_length"), target.number("embedding_length")
    if width != wanted:
        raise misfit(draft, f"{width} wide, and the target {wanted}")
    check_tokens(target, draft)
    return HeadFacts("mtp", draft.n_mtp_layers)


def _assistant(target: Header, draft: Header) -> HeadFacts:
    """Checks all numbers at which llama.cpp would end the process or read out of bounds."""
    if target.architecture != _TARGET_OF_ASSISTANT:
        raise misfit(draft, f"for {_TARGET_OF_ASSISTANT}, and the target is {target.architecture}")
    width, wanted = draft.number("embedding_length_out", 0), target.number("embedding_length")
    if width != wanted:
        raise misfit(draft, f"made for a target of width {width}, and the target has {wanted}")
    n_heads, own_width = draft.number("nextn_predict_layers", 0), draft.number("embedding_length")
    if n_heads != draft.n_layers or own_width == width:
        raise damaged(draft, "its header is not that of an assistant")
    ours, theirs = _windows(draft), _windows(target)
    if theirs[-2:] != [True, False]:
        raise misfit(
            draft, "for targets whose last layers are one with a sliding window and one without"
        )
    if not any(ours):
        raise damaged(draft, "none of its layers has a sliding window")
    for i, has_window in enumerate(ours):
        read = target.n_layers - (2 if has_window else 1)
        found, there = _cells(draft, i, has_window), _cells(target, read, has_window)
        if found != there or 0 in found:
            raise misfit(
                draft,
                f"whose layer {i} reads {_shown(found)}, and the target's layer {read} has "
                f"{_shown(there)}",
            )
        if draft.numbers("attention.head_count")[i] % found[0]:
            raise damaged(draft, f"layer {i} has no whole number of heads for each KV head")
    check_tokens(target, draft)
    return HeadFacts("mtp", shares_cache=True)


def _windows(header: Header) -> list[bool]:
    """Whether each layer has a sliding window. Raises ModelError."""
    found = header.values.get(f"{header.architecture}.attention.sliding_window_pattern")
    if not isinstance(found, list) or len(found) != header.n_layers:
        raise header.damaged(
            f"its sliding_window_pattern is not a list of {header.n_layers} layers"
        )
    return [bool(each) for each in found]


def _cells(header: Header, layer: int, has_window: bool) -> tuple[int, int, int]:
    """The number of KV heads of a layer, and the lengths of their keys and values."""
    kind = "_swa" if has_window else ""
    key, value = (header.number(f"attention.{of}_length{kind}", 0) for of in ("key", "value"))
    return header.numbers("attention.head_count_kv", 0)[layer], key, value


def _shown(cells: tuple[int, int, int]) -> str:
    n_heads, key, value = cells
    return f"{counted(n_heads, 'KV head')} of {key} + {value} numbers"
