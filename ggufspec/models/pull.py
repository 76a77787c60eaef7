"""Turns the name of a model into files on this machine, downloaded if they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ggufspec.common.progress import NamedProgress
from ggufspec.errors import DownloadError
from ggufspec.models import hub, local, quants
from ggufspec.models.download import fetch
from ggufspec.models.hub import RemoteFile
from ggufspec.models.local import HubFiles, HubQuant
from ggufspec.models.registry import ModelEntry, Registry, load_registry


def resolve(
    name: str,
    *,
    registry: Registry | None = None,
    heads: bool = False,
    offline: bool = False,
    progress: NamedProgress | None = None,
) -> Path:
    """The path of a model's GGUF file, which is downloaded and verified if it is not here yet.

    name: a path, a registered name, `user/repo:QUANT`, `user/repo/file.gguf`. Of a split model, the
    first file is returned; the others are beside it. registry: by default shipped and user's own.
    heads: a quantization may be that of a draft head, where there is no model of it. A file in the
    hub's cache is used without asking the hub for a newer one.
    Raises ModelError, DownloadError, CacheError, OptionError.
    """
    if (path := local.local_file(name)) is not None:
        return path
    found = locate(name, registry, heads=heads)
    if found is None:
        found = pull(name, registry=registry, heads=heads, offline=offline, progress=progress)
    return found[0]


def locate(
    name: str, registry: Registry | None = None, *, heads: bool = False
) -> tuple[Path, ...] | None:
    """The files of a model if they are on this machine, else None. Never asks the hub."""
    named = local.parse(name, registry or load_registry())
    return (named,) if isinstance(named, Path) else local.find(named, heads=heads)


def pull(
    name: str,
    *,
    registry: Registry | None = None,
    heads: bool = False,
    offline: bool = False,
    progress: NamedProgress | None = None,
) -> tuple[Path, ...]:
    """Downloads the newest version of a model; returns its files, with every hash checked."""
    named = local.parse(name, registry or load_registry())
    if isinstance(named, Path):
        return (named,)
    if offline or hub.is_offline():
        if (found := local.find(named, heads=heads)) is not None:
            return found
        raise DownloadError(hub.offline_message(name))
    return fetch(_remote_files(named, name, heads), progress)


def _remote_files(
    named: ModelEntry | HubFiles | HubQuant, name: str, heads: bool
) -> list[RemoteFile]:
    try:
        there = hub.list_files(named.repo, named.revision)
    except DownloadError as error:
        is_path = isinstance(named, HubFiles) and named.may_be_path
        if is_path and not isinstance(error, hub.Transient):
            raise DownloadError(f"{error}. There is no local file {name} either") from error
        raise
    files: tuple[str, ...]
    if isinstance(named, HubQuant):
        where = f"{named.repo} at {named.revision}"
        files = quants.choose(there, named.quant, where, heads=heads).files
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
    """A difference between a registry entry and the hub."""

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
