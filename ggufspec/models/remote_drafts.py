"""Drafts on the hub for a target: heads in its repository, and those of known_drafts.toml."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ggufspec.common.reading import read_toml
from ggufspec.errors import DownloadError, ModelError
from ggufspec.models import hub, local, quants
from ggufspec.models.header import Header
from ggufspec.models.registry import Registry

_BITS = 8.5  # per weight: more cost time, fewer cost acceptance
_KINDS = {  # the kind of a head by its file's name, the fastest first
    "an MTP head": r"(^|/)(mtp|assistant)/|(^|/)mtp-",
    "a DFlash head": r"dflash|dspark",
    "an EAGLE-3 head": r"eagle",
    "a draft": r"(?<![a-z0-9])draft(?![a-z0-9])",
}


@dataclass(frozen=True)
class DraftProposal:
    """A draft for a target, and the reason. name: an argument of `resolve`, or MTP.

    n_bytes: what would be downloaded; None: an unknown size; 0: it is on this machine.
    """

    name: str
    why: str
    n_bytes: int | None = 0


def in_repository(repo: str, revision: str) -> Iterator[DraftProposal]:
    """Yields a head or draft of each kind in a target's repository. Raises hub.Transient."""
    sizes = _sizes(repo, revision)
    drafts = [each for each in quants.group(sizes) if each.kind != "model" and not each.missing]
    suffix = "" if revision == "main" else f"@{revision}"
    for what, pattern in _KINDS.items():
        same = [each for each in drafts if re.search(pattern, each.files[0], re.IGNORECASE)]
        if same:
            best = min(same, key=lambda each: (abs(quants.bits_of(each.quant) - _BITS), each.files))
            drafts = [each for each in drafts if each not in same]
            n_bytes = sum(sizes[file] for file in best.files)
            yield DraftProposal(f"{repo}/{best.files[0]}{suffix}", f"{what} in {repo}", n_bytes)


def known(target: Header, registry: Registry, *, asks: bool) -> Iterator[DraftProposal]:
    """Yields the known heads and drafts for a target of this architecture and size.

    asks: those that the hub has, too. Raises hub.Transient.
    """
    for row in _rows():
        if _goes_with(row, target):
            named = local.parse(row["name"], registry)
            assert isinstance(named, local.HubQuant)
            if local.find(named, heads=True) is not None:
                yield DraftProposal(row["name"], row["is"])
            elif asks and (sizes := _sizes(named.repo, named.revision)):
                with suppress(ModelError):  # the repository changed
                    found = quants.choose(sizes, named.quant, named.repo, heads=True)
                    n_bytes = sum(sizes[file] for file in found.files)
                    yield DraftProposal(row["name"], row["is"], n_bytes)


def _goes_with(row: Mapping[str, Any], target: Header) -> bool:
    for key, found in (("billions", target.n_params / 1e9), ("n_vocab", target.n_vocab)):
        least, most = row.get(key, (0.0, math.inf))
        if not least <= found <= most:
            return False
    words = f"{target.name} {target.paths[0].name}".lower()
    return target.architecture in row["architectures"] and row.get("named", "") in words


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    return tuple(read_toml(Path(__file__).with_name("known_drafts.toml"))["drafts"])


def _sizes(repo: str, revision: str) -> Mapping[str, int]:
    """Bytes of each file of a repository; empty if it does not exist. Raises hub.Transient."""
    try:
        there = hub.list_files(repo, revision, patient=False)
    except hub.Transient:
        raise
    except DownloadError:
        return {}
    return {path: file.size for path, file in there.items()}
