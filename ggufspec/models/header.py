"""Reads the header of a GGUF file, skips its long arrays, and checks every count."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from time import time_ns
from typing import Any, BinaryIO

from ggufspec.common.files import is_stream
from ggufspec.errors import ModelError
from ggufspec.models.gguf_file import ARRAY, QUANTIZATIONS, SCALARS, STRING, TYPES_BY_NUMBER, Tensor
from ggufspec.models.quants import shards_of, whole_split

# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_MAGIC = b"GGUF"
_MOST_READ = 2**30  # bytes; a large vocabulary takes about 10 MB
_N_MOST_KEYS, _N_MOST_TENSORS = 2**16, 2**20
_N_MOST_DIMENSIONS, _N_MOST_LAYERS = 4, 2048
_MOST_BYTES = 2**62
_KEPT_NUMBERS = 4096  # longer arrays (a number for each token) are skipped
_SETTLED = 10**9  # nanoseconds after its last change, from which a file counts as unchanged
_ALIGNMENTS = [2**i for i in range(21)]
_MOST_PADDING = 2**12  # bytes, between the files of a split set that were appended
_CUT = "it ends within its header. Download it again"
_PADDING = b"[PAD"  # the beginning of the names of padding tokens
_OF_ADAPTERS = (".lora_a", ".lora_b")


@dataclass(frozen=True)
class Header:
    """The header of a model, joined from all its files if it is split.

    values: the metadata by key: numbers, strings, booleans, lists of numbers or of bytes (strings
    that may not be UTF-8). n_bytes: size of the files. Empty unless read from a file: spans, the
    start and end of each value in the first file; starts, the file and data offset of each tensor.
    """

    paths: tuple[Path, ...]
    n_bytes: int
    values: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    starts: Mapping[str, tuple[Path, int]] = field(default_factory=dict, repr=False)

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    @property
    def name(self) -> str:
        """Its name in the metadata; else the name of the file."""
        found = self.values.get("general.name")
        return found if isinstance(found, str) and found else self.paths[0].stem

    @property
    def n_params(self) -> int:
        return sum(tensor.n_values for tensor in self.tensors)

    @property
    def n_layers(self) -> int:
        """Raises ModelError for an absurd number, since callers loop over the layers."""
        if (found := self.number("block_count")) > _N_MOST_LAYERS:
            raise _damaged(self.paths[0], f"it claims {found:,} layers")
        return found

    @property
    def n_mtp_layers(self) -> int:
        """The number of blocks, at the end, for multi-token prediction."""
        return min(self.number("nextn_predict_layers", 0), self.n_layers)

    @property
    def mtp_layers(self) -> range:
        return range(self.n_layers - self.n_mtp_layers, self.n_layers)

    @property
    def mtp_tensors(self) -> list[Tensor]:
        layers = set(self.mtp_layers)
        return [tensor for tensor in self.tensors if tensor.layer in layers]

    @property
    def n_ctx(self) -> int:
        """The context length of its training, in tokens; 0: unknown."""
        return self.number("context_length", 0)

    @cached_property
    def n_vocab(self) -> int:
        return len(self.tokens) or self.number("vocab_size", 0)

    @cached_property
    def vocabulary(self) -> str:
        """A fingerprint: equal for files whose tokens are the same, except for padding."""
        tokens = self.tokens
        n_real = len(tokens)
        while n_real and tokens[n_real - 1].startswith(_PADDING):
            n_real -= 1
        kind = [str(self.values.get(f"tokenizer.ggml.{key}", "")) for key in ("model", "pre")]
        digest = hashlib.sha256("\0".join(kind).encode())
        for token in tokens[:n_real]:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()[:16]

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self.tensors)

    @property
    def is_tied(self) -> bool:
        """Whether the output matrix is the token embedding."""
        return "output.weight" not in self.tensor_names

    @property
    def n_tensor_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def chat_template(self) -> str | None:
        found = self.values.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None

    @cached_property
    def quantization(self) -> str:
        """Its quantization by llama-quantize's name, if known; else its matrix_type."""
        of = self.values.get("general.file_type")
        name = QUANTIZATIONS[of] if isinstance(of, int) and 0 <= of < len(QUANTIZATIONS) else ""
        return name or self.matrix_type

    @cached_property
    def matrices(self) -> Sequence[Tensor]:
        """The tensors that a pass multiplies with."""
        unused = None if self.is_tied else "token_embd.weight"  # looked up, not multiplied
        used = (each for each in self.tensors if len(each.shape) > 1 and each.name != unused)
        return [each for each in used if not each.name.endswith(_OF_ADAPTERS)]

    @cached_property
    def matrix_type(self) -> str:
        """The type with the most bytes among its matrices."""
        counted: Counter[str] = Counter()
        for tensor in self.matrices:
            counted[tensor.type] += tensor.n_bytes
        return counted.most_common(1)[0][0] if counted else "unknown"

    def damaged(self, what: str) -> ModelError:
        """The error to raise for a file whose content cannot be right."""
        return ModelError(f"{self.paths[0]} is damaged: {what}. Download it again")

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name. Raises ModelError."""
        found = next((tensor for tensor in self.tensors if tensor.name == name), None)
        if found is None:
            raise ModelError(f"{self.name} has no tensor {name}, so it cannot write text")
        return found

    def number(self, key: str, default: int | None = None) -> int:
        """The whole number of a key, given without the architecture. Raises ModelError."""
        name = f"{self.architecture}.{key}"
        found = self.values.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 2**31:
            raise ModelError(
                f"{self.paths[0]} has {_shown(found)} for {name}, which must be a whole number: "
                "the file is damaged, or its architecture is not supported"
            )
        return found

    def numbers(self, key: str, default: int | None = None) -> list[int]:
        """A whole number per layer; a file may store one for all. Raises ModelError."""
        found = self.values.get(f"{self.architecture}.{key}", default)
        is_list = isinstance(found, list) and len(found) == self.n_layers
        if is_list and all(isinstance(each, int) and 0 <= each < 2**31 for each in found):
            return list(found)
        return [self.number(key, default)] * self.n_layers

    @property
    def tokens(self) -> list[bytes]:
        """The text of each token, as stored; empty without a vocabulary. Raises ModelError."""
        found = self.values.get("tokenizer.ggml.tokens", [])
        if not isinstance(found, list) or any(not isinstance(each, bytes) for each in found[:1]):
            raise self.damaged("its vocabulary is not a list of strings")
        return found


def read_header(path: Path) -> Header:
    """The header of a GGUF file, joined with the others of a split model. Raises ModelError.

    One load asks for the same header at several places: a file is parsed again only after it
    changed. A file that was just written may change within one tick of its modification time.
    """
    state: object = time_ns()  # no other call has it
    with suppress(OSError, ValueError):  # parsing says what is wrong
        found = [at.stat() for at in map(path.with_name, whole_split(path.name))]
        if time_ns() - max(each.st_mtime_ns for each in found) >= _SETTLED:
            state = tuple((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns) for at in found)
    return _parsed(path, state)


@lru_cache(maxsize=2)  # a target and a draft
def _parsed(path: Path, state: object) -> Header:
    made = first = read_one(path)
    n_files = first.values.get("split.count", 1)
    if isinstance(n_files, int) and n_files > 1:
        _check_separate(first, n_files)
        parts = (first if at == path else read_one(at) for at in shards_of(path, n_files))
        made = _joined(list(parts))
    if not isinstance(made.values.get("general.architecture"), str):
        raise _damaged(made.paths[0], "it names no architecture")
    return made


def read_one(path: Path) -> Header:
    """The header of this file alone, even if it is part of a split set. Raises ModelError."""
    with open_gguf(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return _Parser(data, path).header()


@contextmanager
def open_gguf(path: Path) -> Iterator[BinaryIO]:
    """A GGUF file, open at its first byte. OSErrors, also of the block, become ModelErrors."""
    try:
        if is_stream(path):
            raise ModelError(f"{path} is not a regular file; name a GGUF model")
        with path.open("rb") as file:
            if not (start := file.read(len(_MAGIC))):
                raise ModelError(
                    f"{path} is empty; a GGUF model was expected (an incomplete download?)"
                )
            if start != _MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file: it starts with {start!r}, a GGUF file with "
                    f"{_MAGIC!r}"
                )
            file.seek(0)
            yield file
    except FileNotFoundError as error:
        raise ModelError(f"there is no file {path}; name the path of a GGUF model") from error
    except IsADirectoryError as error:
        raise ModelError(f"{path} is a folder; name a GGUF file in it") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _check_separate(first: Header, n_files: int) -> None:
    """Raise ModelError for a file of a split set that the next ones were appended to."""
    path = first.paths[0]
    ends = [end for _, end in first.spans.values()]
    ends += [first.starts[each.name][1] + each.n_bytes for each in first.tensors]
    with path.open("rb") as file:
        file.seek(max(ends))
        if _MAGIC in file.read(_MOST_PADDING):
            raise ModelError(
                f"{path} is several of the {n_files} files of a model, appended to one another "
                "(with cat?), which llama.cpp does not read. Keep the files apart, as they were "
                "published, or join them with `llama-gguf-split --merge`"
            )


def _joined(parts: Sequence[Header]) -> Header:
    """Joins the headers of a split set: the first file has the metadata, each has other tensors."""
    for part in parts:
        _check_separate(part, len(parts))
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    paths = tuple(path for part in parts for path in part.paths)
    starts = {name: start for part in parts for name, start in part.starts.items()}
    n_bytes = sum(part.n_bytes for part in parts)
    whole = Header(paths, n_bytes, parts[0].values, tensors, parts[0].spans, starts)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise _damaged(paths[0], "two of its files hold the same tensor")
    n_tensors = whole.values.get("split.tensors.count", len(tensors))
    if n_tensors != len(tensors):
        raise _damaged(paths[0], f"its files hold {len(tensors)} tensors together, not {n_tensors}")
    return whole


class _Parser:
    def __init__(self, data: mmap, path: Path) -> None:
        self._data, self._path, self._n_bytes = data, path, len(data)
        self._end = min(len(data), _MOST_READ)
        self._at = len(_MAGIC)
        self._damaged = partial(_damaged, path)

    def header(self) -> Header:
        version = self._number("I")
        if version not in (2, 3):
            raise self._damaged(f"it has version {version} of the format; 2 and 3 are supported")
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        if n_tensors > _N_MOST_TENSORS or n_keys > _N_MOST_KEYS:
            raise self._damaged(f"it claims {n_tensors:,} tensors and {n_keys:,} keys")
        values: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(n_keys):
            key = self._text()
            if not key or key in values:
                raise self._damaged(f"the key {_shown(key)} is empty or duplicate")
            start = self._at
            values[key] = self._value(self._number("I"))
            spans[key] = (start, self._at)
        if not isinstance(values.get("general.architecture"), str) and "split.no" not in values:
            raise self._damaged("it names no architecture")
        placed = [self._tensor() for _ in range(n_tensors)]
        if len({tensor.name for tensor, _ in placed}) < n_tensors:
            raise self._damaged("two of its tensors have the same name")
        alignment = values.get("general.alignment", 32)  # the default of the format
        if type(alignment) is not int or alignment not in _ALIGNMENTS:
            raise self._damaged(f"it aligns its tensors to {_shown(alignment)} bytes")
        data_start = -(-self._at // alignment) * alignment
        end = max((data_start + at + tensor.n_bytes for tensor, at in placed), default=0)
        if end > self._n_bytes:
            raise self._damaged(
                f"it is truncated: its tensors end at byte {end:,}, the file at {self._n_bytes:,}. "
                "Download it again"
            )
        tensors = tuple(tensor for tensor, _ in placed)
        starts = {tensor.name: (self._path, data_start + at) for tensor, at in placed}
        return Header((self._path,), self._n_bytes, values, tensors, spans, starts)

    def _tensor(self) -> tuple[Tensor, int]:
        name = self._text()
        n_dimensions = self._number("I")
        if not 1 <= n_dimensions <= _N_MOST_DIMENSIONS:
            raise self._damaged(f"{_shown(name)} has {n_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(n_dimensions))
        kind, offset = self._number("I"), self._number("Q")
        if (type_ := TYPES_BY_NUMBER.get(kind)) is None:
            raise self._damaged(f"{_shown(name)} has the unknown type {kind}")
        n_values = math.prod(shape)
        if not 0 < n_values < _MOST_BYTES or shape[0] % type_.n_values or offset >= _MOST_BYTES:
            raise self._damaged(
                f"{_shown(name)} of type {type_.name} has the shape {shape} at byte {offset}"
            )
        return Tensor(name, shape, type_.name), offset

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in SCALARS:
            raise self._damaged(f"a value has the unknown type {kind}")
        return self._number(SCALARS[kind])

    def _array(self, kind: int, n: int) -> list[Any] | None:
        if kind == STRING:
            return self._texts(n)
        if kind not in SCALARS:
            raise self._damaged(f"an array has elements of the invalid type {kind}")
        code = SCALARS[kind]
        raw = self._take(n * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{n}{code}", raw)) if n <= _KEPT_NUMBERS else None

    def _texts(self, n: int) -> list[bytes]:
        """Reads `n` strings; optimized, since a vocabulary has up to 260,000."""
        self._check_room(n * 8)
        data, at, end = self._data, self._at, self._end
        length_at: Callable[[mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        for _ in range(n):
            start = at + 8
            at = end + 1 if start > end else start + length_at(data, at)[0]
            if at > end:
                raise self._damaged(_CUT)
            found.append(data[start:at])
        self._at = at
        return found

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, n: int) -> bytes:
        self._check_room(n)
        self._at += n
        return self._data[self._at - n : self._at]

    def _check_room(self, n: int) -> None:
        if n > self._end - self._at:
            raise self._damaged(_CUT)


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged, or not a complete GGUF file: {what}")


def _shown(value: object) -> str:
    return repr(value)[:60]
