"""LoRA adapters: parses the option, and checks that the files fit the model before llama.cpp does.

Low-rank adaptation: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ggufspec.common import validate
from ggufspec.errors import ModelError, OptionError
from ggufspec.models.gguf_file import Tensor
from ggufspec.models.header import Header, read_one

_A, _B = ".lora_a", ".lora_b"
_UNUSED = "_norm.weight"  # llama.cpp ignores these
_EMBEDDING = "token_embd.weight"
_ALPHA = "adapter.lora.alpha"
_TOKENS = "adapter.alora.invocation_tokens"
_TYPES = ("F32", "F16", "BF16", "Q8_0")  # what llama.cpp's convert_lora_to_gguf.py writes
_FLOAT32_BYTES = 8  # type and value of a float32 in a header; llama.cpp aborts at a double


class Adapter(NamedTuple):
    """Narrow matrices whose products, times `scale`, are added to the weights of a model."""

    path: Path
    scale: float = 1.0


Adapters = tuple[Adapter, ...]


def adapters_of(name: str, given: object) -> Adapters:
    """The adapters that an option lists: paths, or (path, scale) pairs. Raises OptionError."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise OptionError(f"{name} is {given!r}; it must be a list of files or (file, scale) pairs")
    adapters = []
    for each in given:
        path, scale = each if isinstance(each, (tuple, list)) and len(each) == 2 else (each, 1.0)
        what = f"the scale of {path} in an entry of {name}"
        found = validate.number32(what, scale)
        if not math.isfinite(found):
            raise OptionError(f"{what} is {found}; it must be a finite number")
        adapters.append(Adapter(validate.path(f"an entry of {name}", path), found))
    return tuple(adapters)


def with_adapters(model: Header, adapters: Adapters) -> Header:
    """The header of a model, with the tensors of its adapters added to the layers they change.

    Raises ModelError for a file that is no adapter of this model: with some, llama.cpp would end
    the process; with others, it would compute something else.
    """
    added = [tensor for each in adapters for tensor in _tensors(model, each)]
    return replace(model, tensors=(*model.tensors, *added)) if added else model


def _tensors(model: Header, adapter: Adapter) -> Iterator[Tensor]:
    """The tensors of an adapter that llama.cpp loads, checked."""
    header = read_one(adapter.path)
    _check_kind(header, model)
    _check_alpha(header, adapter)
    shapes: dict[str, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        name, end = tensor.name[: -len(_A)], tensor.name[-len(_A) :]
        if end in (_A, _B):
            shapes.setdefault(name, {})[end] = tensor
        elif not tensor.name.endswith(_UNUSED):
            raise _damaged(header, f"its tensor {tensor.name} is neither {_A} nor {_B}")
    if not shapes:
        raise _damaged(header, "it has no tensors")
    weights = {tensor.name: tensor for tensor in model.tensors}
    for name, pair in shapes.items():
        if len(pair) < 2:
            raise _damaged(header, f"it has only {next(iter(pair))} of {name}")
        if (weight := weights.get(name)) is None:
            raise _misfit(header, f"it changes {name}, and the model has no such tensor")
        _check_pair(header, model, weight, pair[_A], pair[_B])
        yield from pair.values()


def _check_kind(header: Header, model: Header) -> None:
    path, values = header.paths[0], header.values
    kind = values.get("general.type", "model")
    if kind != "adapter":
        raise ModelError(
            f"{path} is no LoRA adapter: its general.type is {kind!r}, and 'adapter' was expected. "
            "Convert an adapter with llama.cpp's convert_lora_to_gguf.py; a model is named with "
            "--target or --draft"
        )
    if (of := values.get("adapter.type")) != "lora":
        raise ModelError(
            f"{path} is an adapter of the type {of!r}; llama.cpp supports only the type 'lora'"
        )
    if _TOKENS in values:
        raise ModelError(
            f"{path} is an activated LoRA, which changes a text from its invocation tokens on; "
            "that is not supported. Use an ordinary LoRA adapter"
        )
    if header.architecture != model.architecture:
        of = header.architecture
        raise _misfit(header, f"its architecture is {of}, the model's {model.architecture}")


def _check_alpha(header: Header, adapter: Adapter) -> None:
    alpha = header.values.get(_ALPHA, 0.0)
    start, end = header.spans.get(_ALPHA, (0, _FLOAT32_BYTES))
    is_float32 = isinstance(alpha, float) and end - start == _FLOAT32_BYTES
    if not is_float32 or not math.isfinite(alpha):
        raise _damaged(header, f"its {_ALPHA} is {alpha!r}, and a finite 32-bit float was expected")
    # llama.cpp computes scale * alpha first, then divides by the rank.
    validate.number32(f"the scale of {adapter.path} times its alpha", adapter.scale * alpha)


def _check_pair(header: Header, model: Header, weight: Tensor, a: Tensor, b: Tensor) -> None:
    """Raise ModelError where B A cannot be added to a weight, or llama.cpp would abort at it."""
    for each in (a, b):
        if each.type not in _TYPES:
            raise ModelError(
                f"{header.paths[0]} has {each.name} in {each.type}; an adapter may have "
                f"{', '.join(_TYPES)}. Convert it again, with one of these types"
            )
    if weight.type == "NVFP4" or (weight.name == _EMBEDDING and model.is_tied):
        why = "its type NVFP4" if weight.type == "NVFP4" else "also the output matrix"
        raise ModelError(
            f"{header.paths[0]} changes {weight.name}, which llama.cpp cannot for this model "
            f"({why}): train the adapter without it, or merge it into the model"
        )
    n_in, n_out, *others = _dimensions(weight)
    (a_in, a_rank, *a_others), (b_rank, b_out, *b_others) = _dimensions(a), _dimensions(b)
    if weight.name.endswith(_EMBEDDING):  # A is looked up by token here, not multiplied
        n_in, n_out, a_in, a_rank = n_out, n_in, a_rank, a_in
    needed = (n_in, b_rank, n_out, others, others)
    if (a_in, a_rank, b_out, a_others, b_others) != needed:
        raise _misfit(
            header,
            f"{a.name} and {b.name} are {_shown(a)} and {_shown(b)}, and {weight.name} is "
            f"{_shown(weight)}",
        )


def _dimensions(tensor: Tensor) -> list[int]:
    return [*tensor.shape, *[1] * (4 - len(tensor.shape))]


def _shown(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))


def _misfit(header: Header, what: str) -> ModelError:
    return ModelError(
        f"{header.paths[0]} is not a LoRA adapter of this model: {what}. Use one that was made for "
        "it"
    )


def _damaged(header: Header, what: str) -> ModelError:
    return ModelError(f"{header.paths[0]} is damaged: {what}. Convert the adapter again")
