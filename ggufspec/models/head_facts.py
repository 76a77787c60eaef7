"""Facts about draft heads, and checks of heads that read inputs of the target's layers.

Without these checks of EAGLE-3, DFlash, DFlash2 and DSpark heads, llama.cpp would end the process,
read memory out of bounds, or load a head that belongs to another model.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from ggufspec.common.reading import read_toml
from ggufspec.errors import ModelError, VocabError
from ggufspec.models.header import Header, open_gguf
from ggufspec.models.vocabulary_overlap import has_same_tokens

MTP: Final = "mtp"  # as a draft: the head in the target's file; a file of that name is ./mtp
EAGLE3, ASSISTANT, DFLASH = "eagle3", "gemma4-assistant", "dflash"  # architectures
KINDS = {
    EAGLE3: "an EAGLE-3 head",
    ASSISTANT: "a Gemma 4 assistant",
    DFLASH: "a DFlash head",
}
# llama.cpp computes logits of each token of an EAGLE-3 head's batch, and allocates logits for each
# encoded row of hidden states.
EAGLE3_BATCH, EAGLE3_ROWS = 128, 32
DFLASH_BATCH = 64  # llama.cpp computes logits of each token of this batch, too


@dataclass(frozen=True)
class Block:
    """The input with which a DFlash head drafts: the text's last token, then `mask` tokens."""

    n_tokens: int  # length of a block in training
    mask: int
    first: int = 1  # index of the first place that predicts, namely the next token of the text
    n_candidates: int = 0  # tokens that DFlash2 scores per place, given the token before; 0: all
    is_causal: bool = False  # a token of a block sees no later ones


@dataclass(frozen=True)
class HeadFacts:
    """A head that drafts from the target's hidden states."""

    kind: Literal["mtp", "eagle3", "dflash"]
    n_layers: int = 1  # number of its layers that draft one token each
    target_layers: tuple[int, ...] = ()  # the target's, whose inputs it reads (EAGLE-3, DFlash)
    shares_cache: bool = False  # it reads the target's KV cache instead of its own
    borrows_output: bool = False  # it uses the target's output matrix
    block: Block | None = None  # of DFlash heads only

    def n_rows(self, n_draft_max: int) -> int:
        """Tokens, each with a row of logits, in a pass of the head that drafts `n_draft_max`."""
        return min(self.block.n_tokens, self.block.first + n_draft_max) if self.block else 1


@cache
def architectures() -> Mapping[str, Any]:
    """The table of architectures that llama.cpp can run with each kind of head."""
    return read_toml(Path(__file__).with_name("architectures.toml"))["heads"]  # type: ignore[no-any-return]


def is_dspark(header: Header) -> bool:
    """Whether a DFlash head has a Markov head, too."""
    return "markov_w1.weight" in header.tensor_names


def kind_of(header: Header) -> str:
    if header.architecture == DFLASH:
        if is_dspark(header):
            return "a DSpark head"
        if "selector_hidden.weight" in header.tensor_names:
            return "a DFlash2 head"
    return KINDS.get(header.architecture, "an MTP head")


def check_tokens(target: Header, draft: Header) -> None:
    """Raise VocabError if the target may write a token that the head does not have."""
    if not has_same_tokens(target, draft) or len(draft.tokens) < len(target.tokens):
        raise VocabError(
            f"{draft.paths[0]} is {kind_of(draft)} for another vocabulary ({len(draft.tokens):,} "
            f"tokens) than the target's ({len(target.tokens):,}). Use the head that was made for "
            "this target"
        )


def misfit(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} is {kind_of(draft)} {what}. Use the head that was made for this target"
    )


def damaged(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} cannot be used as {kind_of(draft)}: {what}. Convert it again"
    )


_N_TARGET_LAYERS = 3  # read by an EAGLE-3 head
_BLOCK_SIZE = 16  # default of DFlash heads without the key
_MOST_TOKENS = 1024  # in a block
# llama.cpp has room for 1,024 operations, of which DSpark needs up to 20 for each token.
_MOST_CHAINED = 24


def eagle3(target: Header, draft: Header) -> HeadFacts:
    """The facts of an EAGLE-3 head, checked. Raises ModelError, VocabError."""
    width, read = target.number("embedding_length"), draft.number("target_hidden_size", 0)
    if read != width:
        raise misfit(draft, f"made for a target of width {read}, and the target has {width}")
    layers = _target_layers(target, draft, "three layers", _N_TARGET_LAYERS)
    check_tokens(target, draft)
    _check_eagle3_tensors(target, draft, width)
    borrows_output = "output.weight" not in draft.tensor_names
    return HeadFacts("eagle3", 1, layers, borrows_output=borrows_output)


def dflash(target: Header, draft: Header) -> HeadFacts:
    """The facts of a DFlash, DFlash2 or DSpark head, checked. Raises ModelError, VocabError.

    Keys: src/models/dflash.cpp and common/speculative.cpp of llama.cpp.
    """
    if draft.number("hyper_connection_count", 0):
        raise ModelError(
            f"{draft.paths[0]} is a DSpark head of DeepSeek-V4, which is not supported. Use "
            "another draft"
        )
    width, own = target.number("embedding_length"), draft.number("embedding_length")
    if own != width:
        raise misfit(draft, f"{own} wide, and the target {width}")
    layers = _target_layers(target, draft, "a list of layers")
    check_tokens(target, draft)
    block = _block(draft)
    _check_dflash_attention(draft)
    _check_dflash_tensors(target, draft, width, layers, block)
    own_ends = {"output.weight", "token_embd.weight"} & draft.tensor_names
    return HeadFacts("dflash", 1, layers, borrows_output=not own_ends, block=block)


def _target_layers(
    target: Header, draft: Header, wanted: str, n_wanted: int | None = None
) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads."""
    if target.architecture not in architectures()["layer_inputs"]:
        raise ModelError(
            f"{draft.paths[0]} is {kind_of(draft)}. It needs inputs of the target's layers, which "
            f"llama.cpp does not give for the architecture {target.architecture}. Use another draft"
        )
    found = draft.values.get(f"{draft.architecture}.target_layers")
    layers = tuple(found) if isinstance(found, list) else ()
    is_list = layers and all(isinstance(each, int) for each in layers)
    if not is_list or len(layers) != (n_wanted or len(layers)):
        raise damaged(draft, f"its target_layers are {found}; they must be {wanted}")
    n = target.n_layers - target.n_mtp_layers
    last = n if target.architecture in architectures()["final_states"] else n - 1
    if not all(0 <= each <= last for each in layers):
        shown = ", ".join(map(str, layers))
        raise misfit(draft, f"made for layers {shown}, and the target has layers 0 to {last}")
    return layers


def _block(draft: Header) -> Block:
    n_tokens = draft.number("block_size", _BLOCK_SIZE)
    mask = draft.values.get("tokenizer.ggml.mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < draft.n_vocab:
        raise damaged(draft, f"its mask token is {mask}; it must be one of the vocabulary")
    is_causal = draft.values.get(f"{DFLASH}.attention.causal", False)
    from_anchor = draft.values.get(f"{DFLASH}.sample_from_anchor", True)
    is_chained = is_dspark(draft)
    first = 0 if from_anchor and is_chained else 1
    n_candidates = 0
    if "selector_hidden.weight" in draft.tensor_names:
        n_candidates = draft.number("selector_top_k", 0)
        if not 0 < n_candidates * (n_candidates + 1) <= draft.number("embedding_length"):
            raise damaged(draft, f"it scores {n_candidates} candidates for each token")
    if not first < n_tokens < _MOST_TOKENS:
        raise damaged(draft, f"its blocks have {n_tokens} tokens")
    n_used = min(n_tokens, _MOST_CHAINED) if is_chained else n_tokens
    return Block(n_used, mask, first, n_candidates, bool(is_causal))


def _check_dflash_attention(draft: Header) -> None:
    """Raise ModelError for layers that differ, or a rotation or window the graph does not check."""
    for name in ("head_count", "head_count_kv"):
        if len(set(draft.numbers(f"attention.{name}", 1))) > 1:
            raise damaged(draft, f"its layers have different {name}s")
    n_heads = draft.numbers("attention.head_count", 1)[0]
    n_kv_heads = draft.numbers("attention.head_count_kv", n_heads)[0]
    if not n_heads or not n_kv_heads or n_heads % n_kv_heads:
        raise damaged(draft, f"it has {n_heads} heads for {n_kv_heads} KV heads")
    usual = draft.number("embedding_length") // n_heads
    lengths = [draft.number(f"attention.{of}_length", usual) for of in ("key", "value")]
    if window := draft.number("attention.sliding_window", 0):
        lengths += [
            draft.number(f"attention.{of}_length_swa", lengths[0]) for of in ("key", "value")
        ]
        pattern = draft.values.get(f"{DFLASH}.attention.sliding_window_pattern")
        if not isinstance(pattern, list) or not any(pattern[: draft.n_layers]):
            raise damaged(draft, f"none of its layers has its window of {window} tokens")
    if len(set(lengths)) > 1:
        raise damaged(draft, "its keys and values have different lengths")
    sections = draft.values.get(f"{DFLASH}.rope.dimension_sections")
    if isinstance(sections, list) and any(sections):
        is_right = all(isinstance(each, int) and each >= 0 for each in sections)
        if not is_right or not any(sections[:3]) or sum(sections) > lengths[0]:
            raise damaged(draft, f"its heads rotate sections of {sections} dimensions")


def _check_dflash_tensors(
    target: Header, draft: Header, width: int, layers: tuple[int, ...], block: Block
) -> None:
    shapes = {tensor.name: tensor.shape for tensor in draft.tensors}
    if is_dspark(draft) and "dflash.block_size" not in draft.values:
        raise damaged(draft, "it has no block_size, which DSpark heads need")
    wanted = {"fc.weight": (len(layers) * width, width)}
    n_own = shapes["d2t"][0] if "d2t" in shapes else draft.n_vocab
    own, theirs = shapes.get("token_embd.weight"), target.n_vocab
    if own is None and block.mask >= theirs:
        raise misfit(draft, f"whose mask token {block.mask} the target does not have")
    if own is None and "output.weight" not in shapes and n_own != theirs:
        raise misfit(draft, f"for {n_own:,} tokens, and the target's output has {theirs:,}")
    if "output.weight" in shapes:
        wanted["output.weight"] = (width, n_own)
    if block.n_candidates > n_own:
        raise damaged(draft, f"it scores {block.n_candidates} of {n_own} tokens")
    for name, needed in wanted.items():
        if (found := shapes.get(name)) != needed:
            raise damaged(draft, f"{name} is {_shape(found)}; it must be {_shape(needed)}")
    if "d2t" in shapes:
        _check_d2t(draft, draft.n_vocab)


def _shape(shape: tuple[int, ...] | None) -> str:
    return " x ".join(f"{n:,}" for n in shape) if shape else "missing"


def _check_eagle3_tensors(target: Header, draft: Header, width: int) -> None:
    shapes = {tensor.name: tensor.shape for tensor in draft.tensors}
    n_embd, n_heads = draft.number("embedding_length"), draft.number("attention.head_count")
    if draft.n_layers != 1 or not n_heads:
        raise damaged(draft, f"it has {draft.n_layers} layers of {n_heads} heads; one is needed")
    lengths = {draft.number(f"attention.{of}_length", n_embd // n_heads) for of in ("key", "value")}
    if len(lengths) > 1:
        raise damaged(draft, "its keys and values have different lengths")
    n_vocab, d2t = draft.n_vocab, shapes.get("d2t")
    n_own = d2t[0] if d2t else n_vocab
    widths = {"fc.weight": _N_TARGET_LAYERS * width}
    widths |= {f"blk.0.attn_{of}.weight": 2 * n_embd for of in "qkv"}
    for name, wanted in widths.items():
        if name not in shapes or shapes[name][0] != wanted:
            has = f"is {shapes[name][0]} wide" if name in shapes else "is missing"
            raise damaged(draft, f"{name} {has}; it must be {wanted} wide")
    for name, n_rows in (("token_embd.weight", target.n_vocab), ("output.weight", n_own)):
        shape, whose = shapes.get(name), "it has"
        if shape is None:  # the head uses the target's tensor
            if n_embd != width:
                raise misfit(draft, f"{n_embd} wide without its own {name}, and the target {width}")
            shape, whose = (width, target.n_vocab), "the target has"
        if shape[0] != n_embd or shape[1] < n_rows or (name[0] == "o" and shape[1] != n_rows):
            raise misfit(
                draft, f"to have {n_rows:,} rows of {n_embd} in {name}; {whose} {shape[1]:,}"
            )
    if d2t is not None:
        _check_d2t(draft, n_vocab)


def _check_d2t(draft: Header, n_vocab: int) -> None:
    """Raise ModelError if `d2t` maps a drafted token outside the vocabulary."""
    tensor = draft.tensor("d2t")
    if tensor.type != "I64" or len(tensor.shape) != 1:
        raise damaged(draft, f"d2t is of type {tensor.type}; it must be a list of I64")
    if found := draft.starts.get("d2t"):
        with open_gguf(found[0]) as file:
            file.seek(found[1])
            data = file.read(tensor.n_bytes)
        ids = struct.unpack(f"<{tensor.n_values}q", data)
        if outside := [each for each in ids if not 0 <= each < n_vocab]:
            raise damaged(
                draft, f"d2t has token {outside[0]}, outside the vocabulary of {n_vocab:,} tokens"
            )
