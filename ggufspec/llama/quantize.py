"""Quantizes the weights of a model file again with llama.cpp."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llama_cpp

from ggufspec.common import child
from ggufspec.common.files import whole_file
from ggufspec.errors import ModelError, OptionError
from ggufspec.llama.log import listening, log
from ggufspec.models.gguf_file import TYPES, check_path
from ggufspec.models.header import Header, read_header
from ggufspec.models.quantization import FILE_TYPES

# By the names of llama-quantize: (llama_ftype, the type of most tensors).
_KNOWN = {**FILE_TYPES, "IQ4_NL": (25, "IQ4_NL"), "IQ4_XS": (30, "IQ4_XS")}
_BUFFER_BYTES = 256 << 20
_NO_TYPE = -1


def requantize(
    source: Path,
    to: Path,
    quantization: str,
    *,
    output_type: str | None = None,
    force: bool = False,
) -> None:
    """Write a copy of a model with other types of weights, atomically.

    quantization: a name of llama-quantize, such as Q4_0. output_type: the type of the output
    matrix, such as Q8_0; None: llama-quantize's choice. force: replace an existing file. Weights
    that are quantized twice are less accurate than those that are quantized once. The metadata
    stays.

    Raises OptionError for an unknown type or a path that must not be written, ModelError for a file
    that llama.cpp cannot quantize, CacheError if the folder does not take the copy.
    """
    header = read_header(source)
    check_path(to, force=force, sources=header.paths)
    number = quantization_number(quantization)
    output = _NO_TYPE if output_type is None else _tensor_type(output_type, header)
    with whole_file(to) as file:
        given = str(header.paths[0]), os.fspath(file.name), str(number), str(output)
        done = child.call(__name__, "quantize_file", *given, is_limited=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").rstrip()
            raise ModelError(f"llama.cpp could not quantize {source} to {quantization}.\n{said}")


def quantize_file(source: str, to: str, number: str, output: str) -> None:
    """Write `to`, or end the process with what llama.cpp complains of. Runs in a child process.

    The numbers are those of llama_ftype and of the output matrix's type.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(number)
    params.allow_requantize = True
    params.max_buf_size = _BUFFER_BYTES
    if int(output) != _NO_TYPE:
        params.output_tensor_type = int(output)
    with listening():
        llama_cpp.llama_backend_init()
        if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(to), params):
            sys.exit(log.complaints() or "  it does not say why")


def quantization_number(quantization: str) -> int:
    """The llama_ftype of a quantization. Raises OptionError for one that is not supported."""
    if quantization.upper() not in _KNOWN:
        raise OptionError(
            f"{quantization!r} is not a quantization that llama.cpp makes of a quantized model; "
            f"supported are {', '.join(_KNOWN)}"
        )
    return _KNOWN[quantization.upper()][0]


def _tensor_type(name: str, header: Header) -> int:
    """ggml's number of a type. Checks that rows are whole blocks, else llama.cpp would abort."""
    known = list(dict.fromkeys(type_ for _, type_ in _KNOWN.values()))
    if name.upper() not in known:
        raise OptionError(f"{name!r} is not a type of weights; supported are {', '.join(known)}")
    of = TYPES[name.upper()]
    n_embd = header.number("embedding_length")
    if n_embd % of.n_values:
        raise OptionError(
            f"{header.name} is {n_embd} wide, and {of.name} needs a multiple of {of.n_values}: "
            "choose another type, such as Q8_0"
        )
    return of.number
