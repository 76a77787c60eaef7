"""Turns the name of a model into files on this machine, downloaded if they are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggufspec.common.progress import NamedProgress
from ggufspec.errors import DownloadError
from ggufspec.models import hub, local, quants
from ggufspec.models.download import fetch
from ggufspec.models.hub import RemoteFile
from ggufspec.models.local import HubFiles, HubQuant
from ggufspec.models.projectors import best_projector
from ggufspec.models.registry import ModelEntry, Registry, load_registry


def resolve(
    name: str,
    *,
    registry: Registry | None = None,
    heads: bool = False,
    offline: bool = False,
    progress: NamedProgress | None = None,
    room: Callable[[], float] | None = None,
    projector: bool = False,
) -> Path:
    """The path of a model's GGUF file, which is downloaded and verified if it is not here yet.

    name: a path, a registered name, `user/repo`, `user/repo:QUANT`, `user/repo/file.gguf`, or
    Ollama's name of a model that it has. Of a split model, the first file is returned; the others
    are beside it. registry: by default shipped and user's own. heads: a quantization may be that of
    a draft head, where there is no model of it. A file in the hub's cache, or in another program's,
    is used without asking the hub for a newer one.
    room: bytes that a model may have if no quantization is named: see `quants.usual`.
    projector: with the model, download the projector that its repository has for it.
    Raises ModelError, DownloadError, CacheError, OptionError.
    """
    if (path := local.local_file(name)) is not None:
        return path
    found = locate(name, registry, heads=heads, nearest=False)
    if found is None:
        how: dict[str, Any] = {"heads": heads, "offline": offline, "progress": progress}
        found = pull(name, registry=registry, room=room, projector=projector, **how)
    return found[0]


def locate(
    name: str, registry: Registry | None = None, *, heads: bool = False, nearest: bool = True
) -> tuple[Path, ...] | None:
    """The files of a model if they are on this machine, else None; see `local.find`."""
    named = local.parse(name, registry or load_registry())
    return (named,) if isinstance(named, Path) else local.find(named, heads=heads, nearest=nearest)


def pull(
    name: str,
    *,
    registry: Registry | None = None,
    heads: bool = False,
    offline: bool = False,
    progress: NamedProgress | None = None,
    room: Callable[[], float] | None = None,
    projector: bool = False,
) -> tuple[Path, ...]:
    """Downloads the newest version of a model; returns its files, with every hash checked.

    Arguments and errors are those of `resolve`. Without a connection, a repository that is named
    without a quantization is the model of it that is on this machine.
    """
    named = local.parse(name, registry or load_registry())
    if isinstance(named, Path):
        return (named,)
    if offline or hub.is_offline():
        if (found := local.find(named, heads=heads)) is not None:
            return found
        raise DownloadError(hub.offline_message(name))
    try:
        remote = _remote_files(named, name, heads, room or (lambda: math.inf))
        if projector:
            there = hub.list_files(named.repo, named.revision)
            found_name = best_projector(there, remote[0].path)
            remote += [there[found_name]] if found_name else []
        return fetch(remote, progress)
    except hub.Transient:
        is_any = isinstance(named, HubQuant) and named.quant is None
        if is_any and (found := local.find(named, heads=heads)) is not None:
            return found
        raise


def _remote_files(
    named: ModelEntry | HubFiles | HubQuant, name: str, heads: bool, room: Callable[[], float]
) -> list[RemoteFile]:
    try:
        there = hub.list_files(named.repo, named.revision)
    except DownloadError as error:
        is_path = not isinstance(named, ModelEntry) and named.may_be_path
        if is_path and not isinstance(error, hub.Transient):
            raise DownloadError(f"{error}. There is no local file {name} either") from error
        raise
    files: tuple[str, ...]
    if isinstance(named, HubQuant):
        where = f"{named.repo} at {named.revision}"
        sizes = {path: file.size for path, file in there.items()}
        n_most = room() if named.quant is None else math.inf
        files = quants.choose(sizes, named.quant, where, heads=heads, n_most=n_most).files
    else:
        files = named.files
        if not set(files) & set(there):
            some = f"it has {', '.join([*there][:8])}" if there else "it has no GGUF files"
            more = f" and {len(there) - 8} more" if len(there) > 8 else ""
            hint = quants.did_you_mean(files[0], there) or f"; {some}{more}"
            where = f"{named.repo} has no file {files[0]} at {named.revision}"
            raise DownloadError(f"{where}{hint}")
    if missing := [file for file in files if file not in there]:
        raise DownloadError(
            f"{named.repo} has only {len(files) - len(missing)} of the {len(files)} files of this "
            f"model: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, so it "
            "could not be loaded; nothing was downloaded"
        )
    remote = [there[file] for file in files]
    if isinstance(named, ModelEntry):
        for file in remote:
            known = named.sha256_of(file.path)
            if known is not None and file.sha256 != known:
                raise DownloadError(
                    f"{named.alias} is registered with the sha256 {known} for {file.path}, "
                    f"but the hub has {file.sha256}: it was replaced there, or the entry is wrong. "
                    f"To use the file on the hub, name it {named.repo}/{file.path}"
                )
    return remote


@dataclass(frozen=True)
class Mismatch:
    alias: str
    what: str  # "size", "sha256 of x.gguf", or "file"
    registered: str
    found: str


def check(entry: ModelEntry) -> Iterator[Mismatch]:
    """Compare a registered model with the hub: yields each mismatch. Raises DownloadError."""
    there = hub.list_files(entry.repo, entry.revision)
    for path in entry.files:
        if path not in there:
            yield Mismatch(entry.alias, "file", path, "does not exist")
        elif (known := entry.sha256_of(path)) not in (None, there[path].sha256):
            found = str(there[path].sha256)
            yield Mismatch(entry.alias, f"sha256 of {path}", str(known), found)
    size = sum(there[path].size for path in entry.files if path in there)
    if entry.size not in (None, size) and set(entry.files) <= set(there):
        yield Mismatch(entry.alias, "size", str(entry.size), str(size))
