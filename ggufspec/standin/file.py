"""A stand-in as a file: planned by what it is like, written whole. Knows no option, prints nothing.

Speed and memory are those of the model that it is like; the text is that of a planted map, and
means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ggufspec.common import gguf_bytes
from ggufspec.common.files import Place, Progress, write_whole
from ggufspec.errors import ModelError, OptionError
from ggufspec.models.names import local_file
from ggufspec.standin.blocks import LAYOUTS
from ggufspec.standin.blueprint import Blueprint, blueprint_of
from ggufspec.standin.weights import Weights
from ggufspec.standin.words import vocabulary_entries

__all__ = ["StandIn", "check_path", "plan", "write"]

_RECIPE = 1  # raise it when other bytes are written: files of two recipes do not agree
_LEAST_VOCABULARY = 512  # bytes and some words
_LEAST_MARGIN = 0.25  # of the largest logit, that it must be ahead of the next
_PLANTABLE = {"F32", "F16", "BF16", *LAYOUTS}
_CONSTANT = {"F32", "F16"}
_PLACE = Place("the folder", "name a file elsewhere")


@dataclass(frozen=True)
class StandIn:
    """A stand-in that is decided but not written. agreement: how often it follows the map."""

    blueprint: Blueprint
    agreement: float

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor."""
        of = self.blueprint
        text = f"stand-in for {of.name}: shape only, the text means nothing"
        entries = dict(
            (
                gguf_bytes.string("general.architecture", of.architecture),
                gguf_bytes.string("general.name", text),
                gguf_bytes.uint32("general.file_type", of.file_type),
                gguf_bytes.uint32("general.quantization_version", 2),
                gguf_bytes.uint32("ggufspec.standin.recipe", _RECIPE),
                gguf_bytes.string("ggufspec.standin.like", of.name),
                gguf_bytes.float32("ggufspec.standin.agreement", self.agreement),
            )
        )
        entries |= {**of.entries, **vocabulary_entries(of.n_vocab)}
        return gguf_bytes.header(entries, [tensor.info for tensor in of.tensors])

    @property
    def n_bytes(self) -> int:
        """Of the file."""
        return len(self.header) + self.blueprint.n_tensor_bytes

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The file in pieces of a few megabytes."""
        yield self.header
        yield from Weights(self.blueprint, self.agreement).chunks()


def plan(like: str | Blueprint, agreement: float = 1.0) -> StandIn:
    """A stand-in for a model that is named as `blueprint_of` takes it.

    agreement: the share of tokens after which it has the successor of the map that all stand-ins of
    its vocabulary share: 1.0 for a target; for a draft, the chance that a drafted token stands if
    those before it do. Raises ModelError for what cannot be stood in for, OptionError for a share
    that is none.
    """
    if not 0 <= agreement <= 1:
        raise OptionError(f"an agreement of {agreement} is no share: it must be from 0 to 1")
    of = blueprint_of(like) if isinstance(like, str) else like
    for tensor in of.tensors:
        types = _PLANTABLE if len(tensor.shape) > 1 else _CONSTANT
        if tensor.type not in types:
            raise ModelError(
                f"{of.name} has {tensor.name} in {tensor.type}, which cannot be written here; "
                f"known are {', '.join(sorted(types))}"
            )
    if of.n_vocab < _LEAST_VOCABULARY:
        raise ModelError(
            f"{of.name} has {of.n_vocab} tokens: a stand-in needs at least {_LEAST_VOCABULARY}"
        )
    width = of.n_embd // (2 if of.is_tied else 1)
    if 1 - math.sqrt(2 * math.log(of.n_vocab) / width) < _LEAST_MARGIN:
        raise ModelError(
            f"{of.name} is {of.n_embd} wide, too narrow for {of.n_vocab:,} tokens to be told apart"
        )
    return StandIn(of, agreement)


def write(
    stand_in: StandIn, path: Path, *, force: bool = False, progress: Progress | None = None
) -> None:
    """Write the file: afterwards it is whole, or as it was before; memory stays small at any size.

    progress: hears of bytes done and bytes in all. force: replace a file that is there.
    Raises OptionError as `check_path`, CacheError if the folder or the disk does not take the file.
    """
    check_path(path, force=force)
    write_whole(path, stand_in.n_bytes, stand_in.chunks(), progress, _PLACE)


def check_path(path: Path, *, force: bool, like: str = "") -> None:
    """Raise OptionError for a path that no file is to be written to.

    A folder, a device, what has no folder to be in, the model that it is like, or, without `force`,
    any file that is there.
    """
    if path.is_dir():
        raise OptionError(f"{path} is a folder: name the file to write, such as {path}/model.gguf")
    if not path.parent.is_dir():
        raise OptionError(f"there is no folder {path.parent} to write {path.name} into: make it")
    if not path.exists():
        return
    source = local_file(like)
    if source is not None and source.samefile(path):
        raise OptionError(f"{path} is the model that the stand-in is to be like: name another file")
    if not path.is_file():
        raise OptionError(f"{path} is no file that could be replaced: name another one")
    if not force:
        raise OptionError(f"{path} is there already: name another file, or replace it with --force")
