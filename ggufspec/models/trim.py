"""Plans a smaller copy of a model file: fewer tokens in its vocabulary, or fewer layers."""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ggufspec.errors import ModelError, OptionError
from ggufspec.models.gguf_file import ARRAY, SCALARS, STRING, Chunk, Encoded, GgufFile
from ggufspec.models.hashes import fingerprint_of
from ggufspec.models.header import Header, layer_of, open_gguf
from ggufspec.models.tensors import Tensor

# The keys that say what was left out. They refer to the first file of a chain of trims.
_SOURCE, _HASH, _N_VOCAB, _TOKENS, _LAYERS = (
    f"ggufspec.trim.{key}" for key in ("source", "source_hash", "n_vocab", "tokens", "layers")
)
_TOKENIZER = "tokenizer.ggml."
_BY_TOKEN = tuple(_TOKENIZER + key for key in ("tokens", "scores", "token_type"))
_MERGES = _TOKENIZER + "merges"
_OF_OTHER_VOCABULARY = "tokenizer.huggingface.json"  # describes all tokens once more
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # llama_token_type
# The special tokens that llama.cpp assumes where a file does not name them, by tokenizer.
_ASSUMED = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}
_WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")  # pre-tokenizers
_SPACE = "\u2581".encode()  # of SentencePiece; spelled in bytes, it would not be read as a space
_BYTE_NAME = re.compile(rb"<0x[0-9A-F]{2}>")
_N_BYTES = 256

_ROWS = ("token_embd.weight", "output.weight", "output.bias")  # one row or value for each token
# Tensors that may be as wide as the vocabulary is large by chance.
_OF_OTHER_SIZE = re.compile(r"position_embd|blk\.\d+\.(attn|ffn|ssm|post)_(?!gate_tid2eid)")
_MAPS = ("d2t", "t2d")  # ids of tokens, in EAGLE
# llama.cpp takes settings from the size of these vocabularies, or reads ids from other keys.
_WHOLE_VOCABULARIES = ("deepseek2", "qwen4exp", "graniteswitch")

# Architectures whose layers do not depend on their number in llama.cpp (its folder src/models).
# fmt: off
_ALIKE = {
    "arcee", "bitnet", "bloom", "codeshell", "exaone", "falcon", "falcon-h1", "gemma", "gpt2",
    "gptneox", "granite", "granitehybrid", "granitemoe", "internlm2", "jamba", "llama", "mamba",
    "mamba2", "mistral3", "mpt", "nemotron", "olmo", "olmoe", "phi2", "phi3", "qwen", "qwen2",
    "qwen2moe", "qwen3", "qwen3moe", "seed_oss", "stablelm", "starcoder", "starcoder2", "xverse",
}
# fmt: on
# Every n-th layer sees all tokens, the others a window. llama.cpp takes a list of layers instead.
_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}
_PATTERN = "attention.sliding_window_pattern"
# llama.cpp recognizes these 27B models by their number of layers, and scales their attention.
_RECOGNIZED = {("gemma2", 46), ("gemma3", 62)}
_NOT_BY_LAYER = ("rope.dimension_sections",)

_CHUNK = 4 << 20


def trimmed(
    source: Header,
    *,
    tokens: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> GgufFile:
    """A copy of a model with only these tokens and layers; weights are copied, not requantized.

    tokens: ids of `source`, to which those of `required_tokens` are added. layers: numbers from 0.
    None: all. Both keep their order in the file, whatever the order here. A token is reached by the
    tokenizer only if the tokens that it is merged from are kept too. All files of a split model go
    into one.

    The metadata gets `ggufspec.trim.source`, `.source_hash` (of `fingerprint_of`), `.n_vocab`,
    `.tokens` (the id in the source by the id in the copy) and `.layers`. In a copy of a trimmed
    file they refer to the model that was trimmed first.

    Raises OptionError for ids and layers that the model does not have, ModelError for a model that
    llama.cpp would not compute in the same way, and for damaged files.
    """
    if tokens is None and layers is None:
        raise OptionError("nothing is left out: name the tokens or the layers to keep")
    values = _stored_values(source)
    made: dict[str, Any] = {
        key: value
        for key, value in values.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    rows = None
    if tokens is not None:
        rows = np.array(_kept_tokens(source, values, tokens), np.int64)
        made |= _vocabulary_values(source, values, rows.tolist())
        made.pop(_OF_OTHER_VOCABULARY, None)
    kept_layers = None if layers is None else _kept_layers(source, layers)
    if kept_layers is not None:
        made |= _layer_values(source, values, kept_layers)
    made |= _origin(source, values, rows, kept_layers)
    pairs = list(_tensors(source, rows, kept_layers))
    return GgufFile(
        made,
        tuple(tensor for tensor, _ in pairs),
        lambda: (_copied(source, of, rows if of.name in _ROWS else None) for _, of in pairs),
        source.paths,
    )


def required_tokens(source: Header) -> list[int]:
    """The tokens that every trimmed vocabulary keeps: single bytes, control and user-defined ones.

    With them any text can be read, and chat templates work. Unused and padding tokens are left out.
    Raises ModelError for a model without a vocabulary, or with a tokenizer that is not supported.
    """
    return _required(source, _stored_values(source))


# Metadata


def _stored_values(source: Header) -> dict[str, Encoded]:
    """All metadata exactly as stored, with the arrays that a header leaves out."""
    if not source.spans:
        raise ModelError(f"{source.name} is not a file; only model files can be trimmed")
    with open_gguf(source.paths[0]) as file:
        data = _read(file, max(end for _, end in source.spans.values()), source.paths[0])
    return {key: Encoded(data[start:end]) for key, (start, end) in source.spans.items()}


def _length(value: Encoded) -> int | None:
    """The length of an array; None: it is a single value."""
    kind: int = struct.unpack_from("<I", value)[0]
    return int(struct.unpack_from("<Q", value, 8)[0]) if kind == ARRAY else None


def _numbers(value: Encoded) -> NDArray[Any]:
    """An array of numbers."""
    code = SCALARS.get(struct.unpack_from("<I", value, 4)[0], "B")
    return np.frombuffer(value, f"<{code}", offset=16)


def _with_numbers(value: Encoded, numbers: NDArray[Any]) -> Encoded:
    return Encoded(value[:8] + struct.pack("<Q", len(numbers)) + numbers.tobytes())


def _with_number(value: Encoded, number: int) -> Encoded:
    kind: int = struct.unpack_from("<I", value)[0]
    return Encoded(struct.pack(f"<I{SCALARS[kind]}", kind, number))


def _picked(source: Header, key: str, value: Encoded, kept: Sequence[int]) -> Any:
    """Some elements of an array, of the same type."""
    if struct.unpack_from("<I", value, 4)[0] == STRING:
        texts = source.values[key]
        return [texts[i] for i in kept]
    return _with_numbers(value, _numbers(value)[kept])


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


# The vocabulary


def _kept_tokens(source: Header, values: dict[str, Encoded], tokens: Sequence[int]) -> list[int]:
    required = _required(source, values)
    n_vocab = len(source.tokens)
    if source.architecture in _WHOLE_VOCABULARIES:
        raise ModelError(
            f"the vocabulary of {source.name} cannot be trimmed: llama.cpp takes other settings of "
            f"the architecture {source.architecture} from its tokens. Keep all tokens"
        )
    for tensor in source.tensors:
        if tensor.name in _ROWS:
            if tensor.shape[-1] != n_vocab:
                raise ModelError(
                    f"{source.name} has {n_vocab:,} tokens, but {tensor.name} has "
                    f"{tensor.shape[-1]:,} rows: its vocabulary cannot be trimmed"
                )
        elif tensor.name.startswith(_MAPS) or (
            n_vocab in tensor.shape and not _OF_OTHER_SIZE.match(tensor.name)
        ):
            raise ModelError(
                f"the vocabulary of {source.name} cannot be trimmed: {tensor.name} also has "
                "values for each token, which is not supported. Keep all tokens"
            )
    return sorted({*_checked(tokens, n_vocab, "tokens"), *required})


def _required(source: Header, values: dict[str, Encoded]) -> list[int]:
    tokens = source.tokens
    tokenizer = source.values.get(_TOKENIZER + "model")
    if not tokens:
        raise ModelError(f"{source.name} has no vocabulary: it cannot be trimmed to fewer tokens")
    if tokenizer not in _ASSUMED:
        raise ModelError(
            f"{source.name} has the tokenizer {tokenizer}, whose vocabulary cannot be trimmed; "
            f"supported are {', '.join(_ASSUMED)}"
        )
    types = _TOKENIZER + "token_type"
    kinds = _numbers(values[types]).tolist() if types in values else [0] * len(tokens)
    if len(kinds) < len(tokens):
        raise ModelError(
            f"{source.paths[0]} is damaged: it has {len(tokens):,} tokens, but {len(kinds):,} "
            "token types. Download it again"
        )
    special = {*_special_ids(source).values()}
    for key, value in values.items():
        if key.endswith("_token_ids") and _length(value) is not None:
            special.update(i for i in _numbers(value).tolist() if 0 <= i < len(tokens))
    is_byte = _is_letter if tokenizer == "gpt2" else _is_byte_name
    n_bytes = 0
    for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if is_byte(text):
            n_bytes += 1
        elif kind in (_CONTROL, _USER_DEFINED):
            if b"unused" in text or text.startswith(b"[PAD"):  # as llama.cpp decides
                continue
        elif kind not in (_UNKNOWN, _BYTE) and text != _SPACE:
            continue
        special.add(i)
    if n_bytes < _N_BYTES and tokenizer != "gpt2":
        raise ModelError(
            f"{source.name} has tokens for {n_bytes} of {_N_BYTES} bytes: with fewer tokens, "
            "llama.cpp could not read every text. Its vocabulary cannot be trimmed"
        )
    return sorted(special)


def _is_letter(text: bytes) -> bool:
    """Whether a token of byte-level BPE is a single byte, which is written as a letter."""
    return len(text) <= 2 and len(text.decode("utf-8", "replace")) == 1


def _is_byte_name(text: bytes) -> bool:
    return _BYTE_NAME.fullmatch(text) is not None


def _special_ids(source: Header) -> dict[str, int]:
    """The special tokens by key, with those that llama.cpp assumes."""
    n_vocab = len(source.tokens)
    found = {
        key: value
        for key, value in source.values.items()
        if key.endswith("_token_id") and type(value) is int and 0 <= value < n_vocab
    }
    for role, token in _ASSUMED[source.values[_TOKENIZER + "model"]].items():
        if not (role == "bos" and source.values.get(_TOKENIZER + "pre") in _WITHOUT_BOS):
            found.setdefault(f"{_TOKENIZER}{role}_token_id", token)
    return found


def _vocabulary_values(
    source: Header, values: dict[str, Encoded], kept: Sequence[int]
) -> dict[str, Any]:
    """The metadata that differs in a vocabulary of these tokens."""
    n_vocab = len(source.tokens)
    new_ids = {old: new for new, old in enumerate(kept)}
    made: dict[str, Any] = {}
    for key, value in values.items():
        n = _length(value)
        if n is None:
            if key == f"{source.architecture}.vocab_size":
                made[key] = _with_number(value, len(kept))
        elif key == _MERGES:
            made[key] = _kept_merges(source, kept)
        elif key.endswith(("_token_ids", ".suppress_tokens")):
            ids = _numbers(value)
            found = [new_ids[old] for old in ids.tolist() if old in new_ids]
            made[key] = _with_numbers(value, np.array(found, ids.dtype))
        elif key in _BY_TOKEN or (key.startswith("tokenizer.") and n == n_vocab):
            made[key] = _picked(source, key, value, kept)
    for key, old in _special_ids(source).items():
        new = new_ids[old]
        made[key] = _with_number(values[key], new) if key in values else new
    return made


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


# Layers


def _kept_layers(source: Header, layers: Sequence[int]) -> list[int]:
    architecture, n_layers = source.architecture, source.n_layers
    if architecture not in _ALIKE and architecture not in _PERIODS:
        raise ModelError(
            f"{source.name} has the architecture {architecture}: no layer of it can be left out, "
            "because llama.cpp may compute a layer by its number. Supported are "
            f"{', '.join(sorted(_ALIKE | _PERIODS.keys()))}"
        )
    if source.number("nextn_predict_layers", 0):
        raise ModelError(
            f"{source.name} has layers that predict further tokens (nextn_predict_layers): no "
            "layer of it can be left out. Use a file without them"
        )
    kept = _checked(layers, n_layers, "layers")
    if (architecture, n_layers) in _RECOGNIZED and len(kept) < n_layers:
        raise ModelError(
            f"{source.name}: no layer of it can be left out, because llama.cpp takes the scale of "
            f"its attention from the number of layers, {n_layers}"
        )
    return kept


def _layer_values(
    source: Header, values: dict[str, Encoded], kept: Sequence[int]
) -> dict[str, Any]:
    """The metadata that differs in a model of these layers."""
    prefix, n_layers = f"{source.architecture}.", source.n_layers
    made: dict[str, Any] = {}
    for key, value in values.items():
        of_layers = key.startswith(prefix) and not key.endswith(_NOT_BY_LAYER)
        if of_layers and _length(value) == n_layers:
            made[key] = _picked(source, key, value, kept)
    period = _PERIODS.get(source.architecture)
    if period is not None and prefix + _PATTERN not in made:
        period = source.number(_PATTERN, period)
        made[prefix + _PATTERN] = [not period or i % period < period - 1 for i in kept]
    count = prefix + "block_count"
    made[count] = _with_number(values[count], len(kept))
    return made


# Where the file comes from


def _origin(
    source: Header,
    values: dict[str, Encoded],
    rows: NDArray[np.int64] | None,
    layers: Sequence[int] | None,
) -> dict[str, Any]:
    name = source.values.get(_SOURCE, source.name)
    made: dict[str, Any] = {_SOURCE: name}
    if _SOURCE not in source.values:
        made[_HASH] = _fingerprint(source.paths)
        made[_N_VOCAB] = source.n_vocab
    if rows is not None:
        made[_TOKENS] = (_numbers(values[_TOKENS])[rows] if _TOKENS in values else rows).tolist()
    if layers is not None:
        before = source.values.get(_LAYERS)
        made[_LAYERS] = [before[i] for i in layers] if before else list(layers)
    n_vocab = source.n_vocab if rows is None else len(rows)
    n_layers = source.n_layers if layers is None else len(layers)
    sizes = [f"{n_vocab:,} tokens"] if rows is not None or _TOKENS in values else []
    sizes += [f"{n_layers} layers"] if layers is not None or _LAYERS in values else []
    made["general.name"] = f"{name}, trimmed to {' and '.join(sizes)}"
    return made


def _fingerprint(paths: Sequence[Path]) -> str:
    try:
        return fingerprint_of(paths)
    except OSError as error:
        raise ModelError(f"{paths[0]} cannot be read: {error}") from error


# Tensors


def _tensors(
    source: Header, rows: NDArray[np.int64] | None, layers: Sequence[int] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of the copy, each with the tensor that it is copied from."""
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


def _copied(source: Header, tensor: Tensor, rows: NDArray[np.int64] | None) -> Iterator[Chunk]:
    """The data of a tensor, or of some rows of it (of some values, if it has one dimension)."""
    path, start = source.starts[tensor.name]
    with open_gguf(path) as file:
        file.seek(start)
        if rows is None:
            for done in range(0, tensor.n_bytes, _CHUNK):
                yield _read(file, min(_CHUNK, tensor.n_bytes - done), path)
            return
        n_rows = tensor.shape[-1]
        row_bytes = tensor.n_bytes // n_rows
        n_step = max(1, _CHUNK // row_bytes)
        for first in range(0, n_rows, n_step):
            n = min(n_step, n_rows - first)
            data = np.frombuffer(_read(file, n * row_bytes, path), np.uint8)
            low, high = np.searchsorted(rows, [first, first + n])
            if low < high:
                yield data.reshape(n, row_bytes)[rows[low:high] - first].data.cast("B")


def _read(file: BinaryIO, n: int, path: Path) -> bytes:
    data = file.read(n)
    if len(data) < n:
        raise ModelError(f"{path} is truncated, or has changed since it was opened: try again")
    return data
