"""Groups the GGUF files of a repository into models, and finds quantizations in file names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from ggufspec.errors import ModelError

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q\d+_[0-9A-Z]+(?:_[0-9A-Z]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32"
    r"|FP16|FP32))(?![A-Z0-9])",
    re.IGNORECASE,
)
_NOT_IN_NAMES = re.compile(r"[\\:\x00-\x1f]")
_NO_MODEL = re.compile(r"mmproj|imatrix|(^|/)ggml-vocab-", re.IGNORECASE)  # GGUF without a model
# Draft heads: in a folder of theirs, or named as llama.cpp names them (common/download.cpp). "MTP"
# later in a name leaves doubt: there it is mostly a whole model that has such a head.
_HEAD = re.compile(
    r"(^|/)(mtp|assistant)/|(^|/)mtp-|(?<![a-z0-9])(eagle-?3|dflash2?|dspark)(?![a-z0-9])",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"(?<![a-z0-9])(mtp|nextn|assistant|eagle|lora|adapter|vocab)(?![a-z0-9])", re.IGNORECASE
)

Kind = Literal["model", "unsure", "head"]  # by the name of the file; unsure: the header tells


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model in a repository, in order; some of a split model may be missing."""

    quant: str | None
    files: tuple[str, ...]
    missing: tuple[str, ...]
    kind: Kind = "model"


def stays_within(path: str) -> bool:
    """Whether the path of a file in a repository stays in the folder that it is joined to.

    The answer is the same on all systems. On Windows, backslashes separate folders, a colon ends
    the name of a drive, and dots and spaces at the end of a name are dropped.
    """
    are_names = all(name and name[-1] not in ". " for name in path.split("/"))
    return are_names and not _NOT_IN_NAMES.search(path)


def whole_split(path: str) -> tuple[str, ...]:
    """All files of the split model that `path` belongs to; if it is not split, only `path`."""
    if (match := _SPLIT.fullmatch(path)) is None:
        return (path,)
    count = int(match["count"])
    return tuple(
        f"{match['stem']}-{number:05}-of-{match['count']}{path[-5:]}"
        for number in range(1, count + 1)
    )


def quant_of(path: str) -> str | None:
    """The quantization in the name of a file or, if there is none, of its folder."""
    folder, _, name = path.rpartition("/")
    for text in (name, folder):
        if found := _QUANT.findall(text):
            return str(found[-1]).upper()
    return None


def group(paths: Iterable[str]) -> tuple[ModelFiles, ...]:
    """The models and draft heads among the files of a repository."""
    there = {path for path in paths if path.lower().endswith(".gguf")}
    wholes = {whole_split(path) for path in there if not _NO_MODEL.search(path)}
    return tuple(
        ModelFiles(
            quant_of(files[0]),
            files,
            tuple(file for file in files if file not in there),
            _kind_of(files[0]),
        )
        for files in sorted(wholes)
    )


def of_quant(models: Iterable[ModelFiles], quant: str, *kinds: Kind) -> list[ModelFiles]:
    """The models of a quantization or, if there are none, of its dynamic variant ("UD-").

    `kinds`: the models of the first kind that has any are returned.
    """
    by_kind: dict[tuple[Kind, str | None], list[ModelFiles]] = {}
    for model in models:
        by_kind.setdefault((model.kind, model.quant), []).append(model)
    wanted = quant.upper()
    found = (by_kind.get((kind, name)) for kind in kinds for name in (wanted, f"UD-{wanted}"))
    return next(filter(None, found), [])


def choose(paths: Iterable[str], quant: str, where: str, *, heads: bool = False) -> ModelFiles:
    """The one model of that quantization. Raises ModelError, which lists the existing ones.

    heads: a draft head will do as well, where there is no model of that quantization.
    """
    there = group(paths)
    found = of_quant(there, quant, *kinds_of(heads))
    if len(found) > 1:
        raise ModelError(
            f"{where} has several models of {quant}: name one of the files {_names(found)}"
        )
    if found:
        return found[0]
    models = [each for each in there if each.kind in kinds_of(heads)]
    if not models:
        raise ModelError(f"{where} has no GGUF models{_unless(there)}: name another repository")
    known = sorted({model.quant for model in models if model.quant})
    hint = did_you_mean(quant, known)
    what = "model or draft head" if heads else "model"
    of_heads = _unless(of_quant(there, quant, "head"))
    raise ModelError(
        f"{where} has no {what} of {quant}{of_heads}{hint or ';'} it has "
        f"{', '.join(known) or _names(models)}"
    )


def kinds_of(heads: bool) -> tuple[Kind, ...]:
    """What may be meant by a quantization, the likeliest first."""
    return ("model", "unsure", "head") if heads else ("model", "unsure")


def _kind_of(path: str) -> Kind:
    if _HEAD.search(path):
        return "head"
    return "unsure" if _DOUBT.search(path) else "model"


def _unless(heads: Sequence[ModelFiles]) -> str:
    """Which draft heads there are instead of a model, for a message; empty without any."""
    return f", only draft heads (name the file with --draft: {_names(heads)})" if heads else ""


def _names(models: Iterable[ModelFiles]) -> str:
    return ", ".join(model.files[0] for model in models)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names similar words, for the end of a message; empty if there are none."""
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), by_lower, n=3, cutoff=0.5) if word else []
    return f"; did you mean {' or '.join(by_lower[name] for name in near)}?" if near else ""
