"""Projectors, which turn images into embeddings of a model: their files, and which fits a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ggufspec.errors import ModelError
from ggufspec.models.header import Header, read_header

ARCHITECTURE = "clip"
# What they compute for an image depends on what stands before it in the prompt: for HunyuanVL, the
# number of images; for DeepSeek 4, the number of tokens.
_NOT_READ = frozenset({"hunyuanvl", "deepseek4v"})


_NAME = "mmproj"
_WITH_BUFFERS = 1.3  # of Gemma 3's projector, 0.86 GB, llama.cpp reports 0.25 GB of buffers
_OF_FORMAT = re.compile(r"mmproj|model|gguf|b?f16|f32|i?q[0-9][a-z0-9_]*")


def projector_beside(target: Path) -> Path | None:
    """The projector in the folder of a model that is for it by its name; None: there is none.

    A name without words of a model (mmproj-F16.gguf) is for all models of the folder. A repository
    of the hub may have it one folder higher.
    """
    folders = [target.parent]
    if target.parents[2:] and target.parents[2].name == "snapshots":
        folders.append(target.parents[1])
    words = set(_words(target.name))
    for folder in folders:
        try:
            names = sorted(file.name for file in folder.glob("*.gguf") if file != target)
        except OSError:
            return None
        fitting = [name for name in names if words.issuperset(_words(name))]
        if (name := best_projector(fitting, target.name)) is not None:
            return folder / name
    return None


def best_projector(files: Iterable[str], target: str) -> str | None:
    """The projector that llama.cpp would take for a model of the same repository, if there is one.

    That in the deepest folder of those above the model's; then with the nearest quantization.
    """
    folder, n_bits = f"/{target}".rpartition("/")[0], _n_bits(target)
    found = [
        (-file.count("/"), abs(_n_bits(file) - n_bits), file)
        for file in files
        if file.endswith(".gguf") and _NAME in file.lower()
        and f"{folder}/".startswith(f"/{file}".rpartition("/")[0] + "/")
    ]  # fmt: skip
    return min(found)[2] if found else None


def check_projector(path: Path) -> Header:
    """The header of a projector for images. Raises ModelError."""
    header = read_header(path)
    if header.values.get("general.architecture") != ARCHITECTURE:
        raise ModelError(
            f"{path} is not a projector for images; name the file with mmproj in its name that was "
            "made for the model (mmproj, -mm)"
        )
    if not header.values.get("clip.has_vision_encoder"):
        raise ModelError(f"{path} is a projector, but not for images; leave it out (--no-mmproj)")
    if (kind := kind_of(header)) in _NOT_READ:
        raise ModelError(f"projectors of type {kind} are not supported; leave {path} out")
    return header


def projector_bytes(path: Path) -> int:
    """Bytes that a projector takes, with the buffers of an image, about; 0 if it is unreadable."""
    try:
        return round(_WITH_BUFFERS * path.stat().st_size)
    except OSError:
        return 0


def _words(name: str) -> list[str]:
    words = re.split(r"[^a-z0-9_]+", name.lower())
    return [word for word in words if word and not _OF_FORMAT.fullmatch(word)]


def _n_bits(name: str) -> int:
    """Bits of a weight, by the quantization in a name; 0 without one."""
    found = re.findall(r"(?:q|f)([0-9]+)", name.lower())
    return int(found[-1]) if found else 0


def kind_of(header: Header) -> str:
    """Its type, by which llama.cpp knows how it computes."""
    values = header.values
    found = values.get("clip.vision.projector_type") or values.get("clip.projector_type") or "mlp"
    return str(found)
