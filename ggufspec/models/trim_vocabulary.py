"""The metadata of a model with fewer tokens, and the tokens that must be kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import Encoded
from ggufspec.models.header import Header

_PREFIX = "tokenizer.ggml."
_TEXTS, _SCORES, _TYPES, _MERGES = (
    _PREFIX + key for key in ("tokens", "scores", "token_type", "merges")
)
_LISTS = ("_token_ids", ".suppress_tokens")  # endings of keys whose values are lists of ids
_WHOLE = "tokenizer.huggingface.json"  # describes the uncut vocabulary once more
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # llama_token_type
# The special tokens that llama.cpp assumes if a file names none, by tokenizer.
_ASSUMED: dict[object, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}
_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")  # pre-tokenizers without a BOS by default
_SPACE = "\u2581".encode()  # SentencePiece's; in byte tokens, it is not read as a space
_BYTE_NAME = re.compile(rb"<0x[0-9A-F]{2}>")
_N_BYTES = 256
# llama.cpp infers settings from the vocabulary size of these, or reads token ids in other keys.
_FIXED = ("deepseek2", "qwen4exp", "graniteswitch")


def required_tokens(source: Header, values: dict[str, Encoded]) -> list[int]:
    """See `trim.required_tokens`. values: all metadata as stored."""
    tokens, tokenizer = source.tokens, source.values.get(_PREFIX + "model")
    if not tokens:
        raise ModelError(f"{source.name} has no vocabulary: it cannot be trimmed to fewer tokens")
    if tokenizer not in _ASSUMED:
        raise ModelError(
            f"{source.name} has the tokenizer {tokenizer}, whose vocabulary cannot be trimmed; "
            f"supported are {', '.join(map(str, _ASSUMED))}"
        )
    if source.architecture in _FIXED:
        raise ModelError(
            f"the vocabulary of {source.name} cannot be trimmed: llama.cpp takes other settings of "
            f"the architecture {source.architecture} from its tokens. Keep all tokens"
        )
    for key in (_SCORES, _TYPES):
        n = values[key].length if key in values else len(tokens)
        if n is None or n < len(tokens):
            raise ModelError(
                f"{source.paths[0]} is damaged: it has {len(tokens):,} tokens, but {n or 0:,} "
                f"values of {key}. Download it again"
            )
    types = values[_TYPES].numbers if _TYPES in values else (0,) * len(tokens)
    required = {*_special_tokens(source).values()}
    for key, value in values.items():
        if key.endswith(_LISTS[0]) and value.is_numbers:
            required.update(i for i in value.numbers if 0 <= i < len(tokens))
    is_byte = _is_letter if tokenizer == "gpt2" else _BYTE_NAME.fullmatch
    n_bytes = 0
    for i, text in enumerate(tokens):
        if is_byte(text):
            n_bytes += 1
        elif types[i] in (_CONTROL, _USER_DEFINED):
            if b"unused" in text or text.startswith(b"[PAD"):  # as llama.cpp decides
                continue
        elif types[i] not in (_UNKNOWN, _BYTE) and text != _SPACE:
            continue
        required.add(i)
    if n_bytes < _N_BYTES and tokenizer != "gpt2":
        raise ModelError(
            f"{source.name} has tokens for {n_bytes} of {_N_BYTES} bytes: with fewer tokens, "
            "llama.cpp could not read every text. Its vocabulary cannot be trimmed"
        )
    return sorted(required)


def cut(source: Header, values: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The metadata of a model with only these tokens, which include the required ones."""
    n_vocab = len(source.tokens)
    new_ids = {old: new for new, old in enumerate(kept)}
    made = {key: value for key, value in values.items() if key != _WHOLE}
    for key, value in values.items():
        if key == _MERGES:
            made[key] = _kept_merges(source, kept)
        elif key.endswith(_LISTS) and value.is_numbers:
            found = [new_ids[old] for old in value.numbers if old in new_ids]
            made[key] = value.with_numbers(found)
        elif key in (_TEXTS, _SCORES, _TYPES) or (
            key.startswith("tokenizer.") and value.length == n_vocab
        ):
            made[key] = value.picked(kept)
    for key, old in _special_tokens(source).items():
        new = new_ids[old]
        made[key] = values[key].with_number(new) if key in values else new
    count = f"{source.architecture}.vocab_size"
    if count in made:
        made[count] = made[count].with_number(len(kept))
    return made


def _special_tokens(source: Header) -> dict[str, int]:
    """The special tokens by key, with those that llama.cpp assumes."""
    n_vocab = len(source.tokens)
    found = {
        key: value
        for key, value in source.values.items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < n_vocab
    }
    for role, token in _ASSUMED[source.values[_PREFIX + "model"]].items():
        if role != "bos" or source.values.get(_PREFIX + "pre") not in _WITHOUT_BOS:
            found.setdefault(f"{_PREFIX}{role}_token_id", token)
    return found


def _is_letter(text: bytes) -> bool:
    """Whether a token of byte-level BPE is a single byte, which is written as a letter."""
    return len(text) <= 2 and len(text.decode("utf-8", "replace")) == 1


def _kept_merges(source: Header, kept: Sequence[int]) -> list[bytes]:
    """The merges of byte pairs whose parts and result are kept."""
    texts = {source.tokens[i] for i in kept}
    merges = []
    for merge in source.values[_MERGES]:
        at = merge.find(b" ", 1)  # as llama.cpp splits it
        left, right = merge[:at], merge[at + 1 :]
        if left in texts and right in texts and left + right in texts:
            merges.append(merge)
    return merges
