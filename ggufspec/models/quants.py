"""Groups the GGUF files of a repository into models, and finds quantizations in file names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from ggufspec.errors import ModelError

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q\d+_[0-9A-Z]+(?:_[0-9A-Z]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|FP8"
    r"|BF16|F16|F32|FP16|FP32))(?![A-Z0-9])",
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
    r"(?<![a-z0-9])(mtp|nextn|assistant|eagle|draft|lora|adapter|vocab)(?![a-z0-9])", re.IGNORECASE
)

USUAL = "Q4_K_M"  # of a repository that is named without a quantization
_USUAL_BITS = 4.85  # per weight
_WIDTHS = {"MXFP4": 4.5, "NVFP4": 4.5, "FP8": 8.0, "F16": 16.0, "F32": 32.0, "BF16": 16.0}
_MORE_BITS = {"0": 0.5, "1": 1.0, "K": 0.6, "XXS": 0.1, "XS": 0.3, "S": 0.6, "M": 0.85}

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


def shards_of(path: Path, n_files: int) -> list[Path]:
    """The files of a split set, of which `path` is one. Raises ModelError if some are missing."""
    names = whole_split(path.name)
    if len(names) != n_files:
        raise ModelError(
            f"{path} is one of {n_files} files of a model, so their names must be "
            f"like model-00001-of-{n_files:05}.gguf"
        )
    paths = [path.with_name(name) for name in names]
    if missing := [at.name for at in paths if not at.exists()]:
        raise ModelError(
            f"{path} is one of {n_files} files of a model; missing beside it are "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}. Download them too"
        )
    return paths


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
    names = (wanted, f"UD-{wanted}", wanted.removeprefix("UD-"))
    found = (by_kind.get((kind, name)) for kind in kinds for name in names)
    return next(filter(None, found), [])


def bits_of(quant: str | None) -> float:
    """About how many bits a weight has in a quantization; infinite if it is not known."""
    name = (quant or "").removeprefix("UD-").removesuffix("_MOE").replace("FP16", "F16")
    if name.replace("FP32", "F32") in _WIDTHS:
        return _WIDTHS[name.replace("FP32", "F32")]
    if (match := re.match(r"I?T?Q(\d+)_", name)) is None:
        return math.inf
    return int(match[1]) + _MORE_BITS.get(name.rpartition("_")[2], 1.0)


def usual(
    models: Iterable[ModelFiles], sizes: Mapping[str, int], n_most: float, *kinds: Kind
) -> list[ModelFiles]:
    """The models of the usual quantization or, if there are none, of the nearest that fits.

    `sizes`: bytes of each file. `n_most`: bytes that fit; if nothing does, the smallest is chosen.
    `kinds`: as for `of_quant`.
    """
    there = list(models)
    for kind in kinds:
        if same := [each for each in there if each.kind == kind]:
            smallest = min(same, key=lambda each: _n_bytes(each, sizes))
            fitting = [each for each in same if _n_bytes(each, sizes) <= n_most] or [smallest]
            nearest = min(fitting, key=lambda each: (*_distance(each.quant), each.files))
            return of_quant(fitting, nearest.quant, kind) if nearest.quant else [nearest]
    return []


def _n_bytes(model: ModelFiles, sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(file, 0) for file in model.files)


def _distance(quant: str | None) -> tuple[float, str]:
    """How far a quantization is from the usual one; of two that are as far, the larger is less."""
    bits = bits_of(quant)
    far = abs(bits - _USUAL_BITS) if quant != USUAL else -1.0
    return far + (0.01 if bits < _USUAL_BITS else 0.0), quant or ""


def choose(
    sizes: Mapping[str, int],
    quant: str | None,
    where: str,
    *,
    heads: bool = False,
    n_most: float = math.inf,
) -> ModelFiles:
    """The one model of that quantization. Raises ModelError, which lists the existing ones.

    sizes: bytes of each file there. quant: None: as `usual`, which also explains `n_most`.
    heads: a draft head will do as well, where there is no model of that quantization.
    """
    there = group(sizes)
    if quant is None:
        found = usual(there, sizes, n_most, *kinds_of(heads))
        quant = (found[0].quant if found else None) or USUAL
    else:
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
