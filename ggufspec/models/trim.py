"""Plans a smaller copy of a model file: fewer tokens in its vocabulary, or fewer layers."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggufspec.common.files import fingerprint_of
from ggufspec.common.reading import read_toml
from ggufspec.errors import ModelError, OptionError
from ggufspec.models.gguf_file import Data, Encoded, GgufFile, Tensor, layer_of
from ggufspec.models.header import Header

# The keys that record what was left out. In a copy of a copy, they refer to the first source.
_SOURCE, _HASH, _N_VOCAB, _TOKENS, _LAYERS = (
    f"ggufspec.trim.{key}" for key in ("source", "source_hash", "n_vocab", "tokens", "layers")
)
_ROWS = ("token_embd.weight", "output.weight", "output.bias")  # one row or value for each token
# Tensors with a dimension that may equal the size of the vocabulary by chance.
_OF_OTHER_SIZE = re.compile(r"position_embd|blk\.\d+\.(attn|ffn|ssm|post)_(?!gate_tid2eid)")
_MAPS = ("d2t", "t2d")  # ids of tokens, in EAGLE
_MULTIPLE = 32  # of rows, as llama.cpp's fastest kernels need (ggml-cpu)
_CHUNK = 4 << 20
_N_BLOCKS = 64  # hashed of a file, for its fingerprint
_TOKENIZER = "tokenizer.ggml."
_TEXTS, _SCORES, _TYPES, _MERGES = (
    _TOKENIZER + key for key in ("tokens", "scores", "token_type", "merges")
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
# How llama.cpp computes layers, by architecture.
_RULES = read_toml(Path(__file__).with_name("architectures.toml"))["layers"]
_PATTERN = "attention.sliding_window_pattern"
_NOT_BY_LAYER = "rope.dimension_sections"


def trimmed(
    source: Header,
    *,
    tokens: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> GgufFile:
    """A copy of a model with only these tokens and layers; weights are copied, not requantized.

    tokens: ids in `source`; `required_tokens` are added, then the lowest other ids up to a multiple
    of 32. layers: numbers from 0. None: all. The copy keeps the order of the source. The tokenizer
    can produce a token only if the tokens that it is merged from are kept too. A split model
    becomes one file.

    The metadata gets `ggufspec.trim.source`, `.source_hash` (by `fingerprint_of`), `.n_vocab`,
    `.tokens` (for each token its id in the source) and `.layers`. In a copy of a trimmed file they
    refer to the model that was trimmed first.

    Raises OptionError for tokens and layers that the model does not have. Raises ModelError for
    damaged files, and for models whose copy llama.cpp would not load, or compute differently.
    """
    if tokens is None and layers is None:
        raise OptionError("nothing is left out: name the tokens or the layers to keep")
    stored = _stored_values(source)
    rows: list[int] | None = None
    values: dict[str, Any] = {
        key: value
        for key, value in stored.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    if tokens is not None:
        required = required_tokens(source)
        _check_rows(source)
        n_vocab = len(source.tokens)
        kept = {*_checked(tokens, n_vocab, "tokens"), *required}
        others = (token for token in range(n_vocab) if token not in kept)
        rows = sorted({*kept, *islice(others, -len(kept) % _MULTIPLE)})
        values = _cut_tokens(source, values, rows)
    if layers is not None:
        _check_layers(source)
        layers = _checked(layers, source.n_layers, "layers")
        values = _cut_layers(source, values, layers)
    values |= _origin(source, stored, rows, layers)
    pairs = list(_tensors(source, rows, layers))
    return GgufFile(
        values,
        tuple(tensor for tensor, _ in pairs),
        lambda: (_copied(source, of, rows if of.name in _ROWS else None) for _, of in pairs),
        source.paths,
    )


def most_frequent(source: Header, n_tokens: int, counts: Mapping[int, int]) -> list[int]:
    """The tokens to keep in a vocabulary of `n_tokens`, for `trimmed`.

    First those of `required_tokens`, then by `counts` of tokens in a text, then by frequency in
    general. Raises OptionError for a size that is not possible, ModelError as `required_tokens`.
    """
    required, n_vocab = {*required_tokens(source)}, len(source.tokens)
    if not len(required) <= n_tokens <= n_vocab:
        raise OptionError(
            f"{source.name} cannot be trimmed to {n_tokens:,} tokens: it has {n_vocab:,}, and "
            f"{len(required):,} are always kept (single bytes, control tokens)"
        )
    # Byte-pair tokens are numbered by frequency; SentencePiece's have scores.
    scores: Sequence[float] = [0.0] * n_vocab
    if source.values[_TOKENIZER + "model"] == "llama":
        scores = _stored_values(source)[_SCORES].numbers
    ranked = sorted(
        range(n_vocab),
        key=lambda token: (token not in required, -counts.get(token, 0), -scores[token]),
    )
    return ranked[:n_tokens]


def required_tokens(source: Header) -> list[int]:
    """The tokens that every trimmed vocabulary keeps: single bytes, control and user-defined ones.

    With them any text can be read, and chat templates work. Unused and padding tokens are left out.
    Raises ModelError for a model without a vocabulary, or with a tokenizer that is not supported.
    """
    values = _stored_values(source)
    tokens, tokenizer = source.tokens, source.values.get(_TOKENIZER + "model")
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
            raise source.damaged(f"it has {len(tokens):,} tokens, but {n or 0:,} values of {key}")
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


def _stored_values(source: Header) -> dict[str, Encoded]:
    """All metadata exactly as stored, including the arrays that `read_header` skips."""
    if not source.spans:
        raise ModelError(f"{source.name} is not a file; only model files can be trimmed")
    data = _mapped(source.paths[0], 0, max(end for _, end in source.spans.values())).tobytes()
    return {key: Encoded(data[start:end]) for key, (start, end) in source.spans.items()}


def _check_rows(source: Header) -> None:
    """Raise ModelError if a tensor with values for each token cannot be trimmed."""
    n_vocab = len(source.tokens)
    for tensor in source.tensors:
        if tensor.name in _ROWS:
            if tensor.shape[-1] != n_vocab:
                raise ModelError(
                    f"{source.name} has {n_vocab:,} tokens, but {tensor.name} has "
                    f"{tensor.shape[-1]:,} rows: its vocabulary cannot be trimmed. Keep all tokens"
                )
        elif tensor.name.startswith(_MAPS) or (
            n_vocab in tensor.shape and not _OF_OTHER_SIZE.match(tensor.name)
        ):
            raise ModelError(
                f"the vocabulary of {source.name} cannot be trimmed: {tensor.name} also has "
                "values for each token, which is not supported. Keep all tokens"
            )


def _checked(numbers: Sequence[int], n: int, what: str) -> list[int]:
    """The numbers in ascending order. Raises OptionError unless all are from 0 to n - 1."""
    try:
        if any(isinstance(each, bool) for each in numbers):
            raise TypeError
        found = sorted({operator.index(each) for each in numbers})
    except TypeError as error:
        raise OptionError(f"{what} must be a list of whole numbers, not {numbers!r:.60}") from error
    if not found:
        raise OptionError(f"the list of {what} to keep is empty: name at least one")
    if outside := [each for each in found if not 0 <= each < n]:
        raise OptionError(
            f"the model has no {what} {', '.join(map(str, outside[:4]))}: it has {n:,}, "
            f"numbered from 0 to {n - 1:,}"
        )
    return found


def _cut_tokens(source: Header, values: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
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
    n_vocab = len(source.tokens)
    found = {
        key: value
        for key, value in source.values.items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < n_vocab
    }
    for role, token in _ASSUMED[source.values[_TOKENIZER + "model"]].items():
        if role != "bos" or source.values.get(_TOKENIZER + "pre") not in _WITHOUT_BOS:
            found.setdefault(f"{_TOKENIZER}{role}_token_id", token)
    return found


def _is_letter(text: bytes) -> bool:
    """Whether a token of byte-level BPE is a single byte, which is written as a letter."""
    return len(text) <= 2 and len(text.decode("utf-8", "replace")) == 1


def _kept_merges(source: Header, kept: Sequence[int]) -> list[bytes]:
    texts = {source.tokens[i] for i in kept}
    merges = []
    for merge in source.values[_MERGES]:
        at = merge.find(b" ", 1)  # as llama.cpp splits it
        left, right = merge[:at], merge[at + 1 :]
        if left in texts and right in texts and left + right in texts:
            merges.append(merge)
    return merges


def _check_layers(source: Header) -> None:
    """Raise ModelError if llama.cpp would compute kept layers differently without the others."""
    architecture = source.architecture
    known = {*_RULES["alike"], *_RULES["periods"]}
    if architecture not in known:
        raise ModelError(
            f"{source.name} has the architecture {architecture}: no layer of it can be left out, "
            "because llama.cpp may compute a layer by its number. Supported are "
            f"{', '.join(sorted(known))}"
        )
    if _RULES["recognized"].get(architecture) == source.n_layers:
        raise ModelError(
            f"{source.name}: no layer of it can be left out, because llama.cpp takes the scale of "
            f"its attention from the number of layers, {source.n_layers}"
        )
    if source.n_mtp_layers:
        raise ModelError(
            f"{source.name} has layers that predict further tokens (nextn_predict_layers): no "
            "layer of it can be left out. Use a file without them"
        )


def _cut_layers(source: Header, values: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    prefix, n_layers = f"{source.architecture}.", source.n_layers
    pattern, count = prefix + _PATTERN, prefix + "block_count"
    made = dict(values)
    for key, value in values.items():
        of_layers = key.startswith(prefix) and key != prefix + _NOT_BY_LAYER
        if of_layers and isinstance(value, Encoded) and value.length == n_layers:
            made[key] = value.picked(kept)
    period = _RULES["periods"].get(source.architecture)
    if period is not None and not isinstance(source.values.get(pattern), list):
        period = source.number(_PATTERN, period)
        made[pattern] = [not period or i % period < period - 1 for i in kept]
    made[count] = made[count].with_number(len(kept))
    return made


def _origin(
    source: Header,
    stored: dict[str, Encoded],
    rows: Sequence[int] | None,
    layers: Sequence[int] | None,
) -> dict[str, Any]:
    name = source.values.get(_SOURCE, source.name)
    made: dict[str, Any] = {_SOURCE: name}
    if _SOURCE not in stored:
        try:
            made[_HASH] = fingerprint_of(source.paths, _N_BLOCKS)
        except OSError as error:
            raise ModelError(f"{source.paths[0]} cannot be read: {error}") from error
        made[_N_VOCAB] = source.n_vocab
    sizes = []
    for key, kept, n_all, what in (
        (_TOKENS, rows, source.n_vocab, "tokens"),
        (_LAYERS, layers, source.n_layers, "layers"),
    ):
        if kept is not None:
            before = stored[key].numbers if key in stored else range(n_all)
            made[key] = [before[i] for i in kept]
        if key in made or key in stored:
            sizes.append(f"{n_all if kept is None else len(kept):,} {what}")
    made["general.name"] = f"{name}, trimmed to {' and '.join(sizes)}"
    return made


def _tensors(
    source: Header, rows: Sequence[int] | None, layers: Sequence[int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    new_layers = None if layers is None else {old: new for new, old in enumerate(layers)}
    for of in source.tensors:
        name, shape = of.name, of.shape
        layer = layer_of(name)
        if layer is not None and new_layers is not None:
            if layer not in new_layers:
                continue
            name = f"blk.{new_layers[layer]}.{name.split('.', 2)[2]}"
        if rows is not None and name in _ROWS:
            shape = (*shape[:-1], len(rows))
        yield Tensor(name, shape, of.type), of


def _copied(source: Header, tensor: Tensor, rows: Sequence[int] | None) -> Iterator[Data]:
    """The data of a tensor, or of some rows of it (of some values, if it has one dimension)."""
    data = _mapped(*source.starts[tensor.name], tensor.n_bytes)
    if rows is None:
        for done in range(0, tensor.n_bytes, _CHUNK):
            yield data[done : done + _CHUNK].data
    else:
        by_row = data.reshape(tensor.shape[-1], -1)
        n_step = max(1, _CHUNK // by_row.shape[1])
        for i in range(0, len(rows), n_step):
            yield by_row[rows[i : i + n_step]].data.cast("B")


def _mapped(path: Path, start: int, n_bytes: int) -> NDArray[np.uint8]:
    """Bytes of a model's file. Raises ModelError."""
    try:
        return np.memmap(path, np.uint8, "r", start, (n_bytes,))
    except (OSError, ValueError) as error:  # ValueError: the file ends before
        raise ModelError(
            f"{path} is truncated, or has changed since it was opened: try again"
        ) from error
