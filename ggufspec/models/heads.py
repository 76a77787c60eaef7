"""Recognises draft heads (MTP, EAGLE-3) by their headers, and refuses those that do not fit."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from ggufspec.common.facts import counted
from ggufspec.common.toml import read_toml
from ggufspec.errors import ModelError, VocabError
from ggufspec.models.header import Header, open_gguf, read_header
from ggufspec.models.vocabulary_overlap import has_same_tokens

MTP: Final = "mtp"  # as a draft: the head in the target's own file (a file: ./mtp)
EAGLE3, _ASSISTANT, _DFLASH = "eagle3", "gemma4-assistant", "dflash"  # architectures
DraftFile = Path | Literal["mtp"]

_N_TARGET_LAYERS = 3
# llama.cpp computes logits of each token of an EAGLE-3 head's batch, and has room for those of each
# row of hidden states that it encodes.
EAGLE3_BATCH, EAGLE3_ROWS = 128, 32
_TARGET_OF_ASSISTANT = "gemma4"
_KINDS = {
    EAGLE3: "an EAGLE-3 head",
    _ASSISTANT: "a Gemma 4 assistant",
    _DFLASH: "a DFlash draft",
}


@cache
def _architectures() -> Mapping[str, Any]:
    """Which architectures llama.cpp can run with which heads."""
    return read_toml(Path(__file__).with_name("architectures.toml"))["heads"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HeadFacts:
    """A head that drafts from the target's hidden states.

    n_layers: its own that draft a token each. target_layers: those of the target whose inputs it
    reads (EAGLE-3). shares_cache: it reads the target's KV cache, and has none. borrows_output: it
    multiplies with the target's output matrix.
    """

    kind: Literal["mtp", "eagle3"]
    n_layers: int = 1
    target_layers: tuple[int, ...] = ()
    shares_cache: bool = False
    borrows_output: bool = False


def head_of(target: Header, draft: Header | None) -> HeadFacts | None:
    """The head of a draft's file, or without one that in the target's file; None: it has none.

    A whole model with MTP layers, named as a draft, is an ordinary draft. Raises ModelError and
    VocabError for a head that does not fit the target, or that llama.cpp does not run.
    """
    if draft is None:
        return None if _why_no_mtp(target) else HeadFacts("mtp", target.n_mtp_layers)
    if draft.architecture == _DFLASH:
        raise ModelError(
            f"{draft.paths[0]} is {_kind(draft)}: not supported yet. Use an MTP head, an EAGLE-3 "
            "head or a small model as the draft"
        )
    if is_head(draft):
        _check_rotation(draft)
    if draft.architecture == EAGLE3:
        return _eagle3(target, draft)
    if draft.architecture == _ASSISTANT:
        return _assistant(target, draft)
    return _sidecar(target, draft) if is_head(draft) else None


def read_draft(target: Header, draft: DraftFile) -> tuple[Header | None, HeadFacts | None]:
    """The header of a draft's file, if it has one, and which head it is. Raises as `head_of`."""
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
    """Whether a file is a draft head, without a model that could write text."""
    return is_mtp_alone(header) or header.architecture in _KINDS


def is_mtp_alone(header: Header) -> bool:
    """Whether a file has layers for multi-token prediction, and no others."""
    has_others = "blk.0.attn_norm.weight" in header.tensor_names and header.mtp_layers.start > 0
    return header.n_mtp_layers > 0 and not has_others


def check_model(header: Header) -> None:
    """Raise ModelError for a draft head, which cannot write text by itself."""
    if is_head(header):
        raise ModelError(
            f"{header.paths[0]} is {_kind(header)}, not a model: name it as the draft (--draft), "
            "and as the target the model that it was made for"
        )


def head_text(header: Header) -> str:
    """What `models show` says of a head: of the file itself, or in it; empty without one."""
    if header.architecture == EAGLE3:
        layers = ", ".join(map(str, header.values.get("eagle3.target_layers") or ["unknown"]))
        width = header.number("target_hidden_size", 0)
        return f"is an EAGLE-3 head for models of width {width}, layers {layers}"
    if header.architecture == _ASSISTANT:
        width = header.number("embedding_length_out", 0)
        return f"is a Gemma 4 assistant (an MTP head) for models of width {width}"
    if is_head(header):
        return f"is {_kind(header)} without a model"
    if _why_no_mtp(header):
        return ""
    n_bytes = sum(tensor.n_bytes for tensor in header.mtp_tensors)
    return f"has an MTP head ({counted(header.n_mtp_layers, 'layer')}, {n_bytes / 1e6:,.0f} MB)"


def _kind(header: Header) -> str:
    return _KINDS.get(header.architecture, "an MTP head")


def _why_no_mtp(header: Header) -> str:
    """Why the MTP head of a file cannot be used; empty: it can."""
    n, of = header.n_mtp_layers, header.architecture
    needed = {f"blk.{i}.nextn.eh_proj.weight" for i in header.mtp_layers}
    if not n or not needed <= header.tensor_names:
        return "has no MTP head (its conversion left it out, or the model has none)"
    if of not in _architectures()["mtp"]:
        return f"has an MTP head, but llama.cpp runs none of the architecture {of}"
    if n > 1 and of not in _architectures()["several_layers"]:
        return f"has an MTP head of {n} layers; llama.cpp runs one of 1 layer for {of}"
    names = _architectures()["asserted"].get(of, ())
    asserted = {f"blk.{i}.{name}.weight" for i in header.mtp_layers for name in names}
    if missing := sorted(asserted - header.tensor_names):
        return f"has an MTP head without {missing[0]}, which llama.cpp needs for {of}"
    return ""


def _check_rotation(draft: Header) -> None:
    """Raise ModelError for rotated dimensions with which llama.cpp would end the process."""
    usual = draft.number("embedding_length") // max(1, *draft.numbers("attention.head_count", 1))
    for kind in ("", "_swa"):
        length = draft.number(f"attention.key_length{kind}", usual)
        n_rot = draft.number(f"rope.dimension_count{kind}", length)
        if n_rot % 2 or not 0 < n_rot <= length:
            raise _damaged(draft, f"its heads rotate {n_rot} dimensions of {length}")


def _sidecar(target: Header, draft: Header) -> HeadFacts:
    if draft.architecture != target.architecture:
        raise _misfit(
            draft,
            f"of the architecture {draft.architecture}, and the target of {target.architecture}",
        )
    if why := _why_no_mtp(draft):
        raise ModelError(f"{draft.paths[0]} {why}. Use another draft")
    width, wanted = draft.number("embedding_length"), target.number("embedding_length")
    if width != wanted:
        raise _misfit(draft, f"{width} wide, and the target {wanted}")
    _check_tokens(target, draft)
    return HeadFacts("mtp", draft.n_mtp_layers)


def _assistant(target: Header, draft: Header) -> HeadFacts:
    """Checks everything on which llama.cpp would end the process, or read other memory."""
    if target.architecture != _TARGET_OF_ASSISTANT:
        raise _misfit(draft, f"for {_TARGET_OF_ASSISTANT}, and the target is {target.architecture}")
    width, wanted = draft.number("embedding_length_out", 0), target.number("embedding_length")
    if width != wanted:
        raise _misfit(draft, f"made for a target of width {width}, and the target has {wanted}")
    n_heads, own_width = draft.number("nextn_predict_layers", 0), draft.number("embedding_length")
    if n_heads != draft.n_layers or own_width == width:
        raise _damaged(draft, "its header is not that of an assistant")
    ours, theirs = _windows(draft), _windows(target)
    if theirs[-2:] != [True, False]:
        raise _misfit(
            draft, "for targets whose last layers are one with a sliding window and one without"
        )
    if not any(ours):
        raise _damaged(draft, "none of its layers has a sliding window")
    for i, has_window in enumerate(ours):
        read = target.n_layers - (2 if has_window else 1)
        found, there = _cells(draft, i, has_window), _cells(target, read, has_window)
        if found != there or 0 in found:
            raise _misfit(
                draft,
                f"whose layer {i} reads {_shown(found)}, and the target's layer {read} has "
                f"{_shown(there)}",
            )
        if draft.numbers("attention.head_count")[i] % found[0]:
            raise _damaged(draft, f"layer {i} has no whole number of heads for each KV head")
    _check_tokens(target, draft)
    return HeadFacts("mtp", shares_cache=True)


def _windows(header: Header) -> list[bool]:
    """Which layers have a sliding window. Raises ModelError."""
    found = header.values.get(f"{header.architecture}.attention.sliding_window_pattern")
    if not isinstance(found, list) or len(found) != header.n_layers:
        raise ModelError(
            f"{header.paths[0]} is damaged: its sliding_window_pattern is not a list of "
            f"{header.n_layers} layers. Download it again"
        )
    return [bool(each) for each in found]


def _cells(header: Header, layer: int, has_window: bool) -> tuple[int, int, int]:
    """KV heads of a layer, and the length of each one's key and value."""
    kind = "_swa" if has_window else ""
    key, value = (header.number(f"attention.{of}_length{kind}", 0) for of in ("key", "value"))
    return header.numbers("attention.head_count_kv", 0)[layer], key, value


def _shown(cells: tuple[int, int, int]) -> str:
    n_heads, key, value = cells
    return f"{counted(n_heads, 'KV head')} of {key} + {value} numbers"


def _eagle3(target: Header, draft: Header) -> HeadFacts:
    """Checks everything on which llama.cpp would end the process, or load another head."""
    if target.architecture not in _architectures()["layer_inputs"]:
        raise ModelError(
            f"{draft.paths[0]} is an EAGLE-3 head. It needs inputs of the target's layers, which "
            f"llama.cpp does not give for the architecture {target.architecture}. Use another draft"
        )
    width, read = target.number("embedding_length"), draft.number("target_hidden_size", 0)
    if read != width:
        raise _misfit(draft, f"made for a target of width {read}, and the target has {width}")
    found = draft.values.get(f"{EAGLE3}.target_layers")
    layers = tuple(found) if isinstance(found, list) else ()
    if len(layers) != _N_TARGET_LAYERS or not all(isinstance(each, int) for each in layers):
        raise _damaged(draft, f"its target_layers are {found}; they must be three layers")
    n = target.n_layers - target.n_mtp_layers
    last = n if target.architecture in _architectures()["final_states"] else n - 1
    if not all(0 <= each <= last for each in layers):
        shown = ", ".join(map(str, layers))
        raise _misfit(draft, f"made for layers {shown}, and the target has layers 0 to {last}")
    _check_tokens(target, draft)
    _check_eagle3_tensors(target, draft, width)
    borrows_output = "output.weight" not in draft.tensor_names
    return HeadFacts("eagle3", 1, layers, borrows_output=borrows_output)


def _check_eagle3_tensors(target: Header, draft: Header, width: int) -> None:
    shapes = {tensor.name: tensor.shape for tensor in draft.tensors}
    n_embd, n_heads = draft.number("embedding_length"), draft.number("attention.head_count")
    if draft.n_layers != 1 or not n_heads:
        raise _damaged(draft, f"it has {draft.n_layers} layers of {n_heads} heads; one is needed")
    lengths = {
        draft.number(f"attention.{kind}_length", n_embd // n_heads) for kind in ("key", "value")
    }
    if len(lengths) > 1:
        raise _damaged(draft, "its keys and values have different lengths")
    n_vocab, d2t = draft.n_vocab, shapes.get("d2t")
    n_own = d2t[0] if d2t else n_vocab
    widths = {"fc.weight": _N_TARGET_LAYERS * width}
    widths |= {f"blk.0.attn_{of}.weight": 2 * n_embd for of in "qkv"}
    for name, wanted in widths.items():
        if name not in shapes or shapes[name][0] != wanted:
            has = f"is {shapes[name][0]} wide" if name in shapes else "is missing"
            raise _damaged(draft, f"{name} {has}; it must be {wanted} wide")
    for name, n_rows in (("token_embd.weight", target.n_vocab), ("output.weight", n_own)):
        shape, whose = shapes.get(name), "it has"
        if shape is None:  # then the target's is used
            if n_embd != width:
                raise _misfit(
                    draft, f"{n_embd} wide without its own {name}, and the target {width} wide"
                )
            shape, whose = (width, target.n_vocab), "the target has"
        if shape[0] != n_embd or shape[1] < n_rows or (name[0] == "o" and shape[1] != n_rows):
            raise _misfit(
                draft, f"to have {n_rows:,} rows of {n_embd} in {name}; {whose} {shape[1]:,}"
            )
    if d2t is not None:
        _check_d2t(draft, n_vocab)


def _check_d2t(draft: Header, n_vocab: int) -> None:
    """Raise ModelError unless each drafted token is one of the vocabulary."""
    tensor = draft.tensor("d2t")
    if tensor.type != "I64" or len(tensor.shape) != 1:
        raise _damaged(draft, f"d2t is of type {tensor.type}; it must be a list of I64")
    if found := draft.starts.get("d2t"):
        with open_gguf(found[0]) as file:
            file.seek(found[1])
            data = file.read(tensor.n_bytes)
        ids = struct.unpack(f"<{tensor.n_values}q", data)
        if outside := [each for each in ids if not 0 <= each < n_vocab]:
            raise _damaged(
                draft, f"d2t has token {outside[0]}, outside the vocabulary of {n_vocab:,} tokens"
            )


def _check_tokens(target: Header, draft: Header) -> None:
    """Raise VocabError unless the head has all tokens that the target may write."""
    if not has_same_tokens(target, draft) or len(draft.tokens) < len(target.tokens):
        raise VocabError(
            f"{draft.paths[0]} is {_kind(draft)} for another vocabulary ({len(draft.tokens):,} "
            f"tokens) than the target's ({len(target.tokens):,}). Use the head that was made for "
            "this target"
        )


def _misfit(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} is {_kind(draft)} {what}. Use the head that was made for this target"
    )


def _damaged(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} cannot be used as {_kind(draft)}: {what}. Convert it again"
    )
