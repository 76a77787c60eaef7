"""From a name to files on this machine: what is there is taken, what is not is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import DownloadError, ModelError
from ggufspec.models import hub, local, names, quants
from ggufspec.models.download import Progress, fetch
from ggufspec.models.hub import RemoteFile
from ggufspec.models.names import HubFiles, HubQuant, LocalFile
from ggufspec.models.registry import ModelEntry, Registry, load_registry

__all__ = ["Difference", "Proposal", "check", "locate", "propose_draft", "pull", "resolve"]


def resolve(
    name: str,
    *,
    registry: Registry | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The GGUF file that a name means: on this machine already, or downloaded and verified now.

    name: a path, a registered name, `user/repo:QUANT`, `user/repo/file.gguf`. Of a split model, it
    is the first file; the others lie beside it. registry: None: the shipped one with the user's.
    What is in the hub's cache is taken without asking the hub whether there is a newer one.
    Raises ModelError, DownloadError, CacheError, OptionError.
    """
    if (path := names.local_file(name)) is not None:
        return path  # nothing else can be wrong with it
    found = locate(name, registry)
    return (found or pull(name, registry=registry, offline=offline, progress=progress))[0]


def locate(name: str, registry: Registry | None = None) -> tuple[Path, ...] | None:
    """The files that a name means, if they are on this machine. Never asks the hub."""
    named = names.parse(name, registry or load_registry())
    return (named.path,) if isinstance(named, LocalFile) else local.find(named)


def pull(
    name: str,
    *,
    registry: Registry | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """The files that a name means, as the hub has them now, with every hash checked."""
    named = names.parse(name, registry or load_registry())
    if isinstance(named, LocalFile):
        return (named.path,)
    if offline or hub.is_offline():
        if (found := local.find(named)) is None:
            raise DownloadError(hub.offline_message(name))
        return found
    return fetch(_remote_files(named, name), progress)


def _remote_files(named: HubFiles | HubQuant, name: str) -> list[RemoteFile]:
    """What is to be there, known before the first byte. Raises DownloadError, ModelError."""
    try:
        listing = hub.listing(named.repo, named.revision)
    except DownloadError as error:
        is_path = isinstance(named, HubFiles) and named.may_be_path
        if is_path and not isinstance(error, hub.Transient):
            raise DownloadError(f"{error}. There is no file {name} here, either") from error
        raise
    there = [file.path for file in listing.files]
    files: tuple[str, ...]
    if isinstance(named, HubQuant):
        files = quants.choose(there, named.quant, f"{named.repo} at {named.revision}").files
    else:
        files = named.files
        if not set(files) & set(there):
            listing.file(files[0])  # raises, and tells what there is
    missing = [file for file in files if file not in there]
    if missing:
        raise DownloadError(
            f"{named.repo} has only {len(files) - len(missing)} of the {len(files)} files of this "
            f"model: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, so it "
            "could not be loaded; nothing was downloaded"
        )
    remote = [listing.file(file) for file in files]
    if isinstance(named, HubFiles) and named.entry is not None:
        _check_registered(named.entry, remote)
    return remote


def _check_registered(entry: ModelEntry, remote: list[RemoteFile]) -> None:
    for file in remote:
        known = entry.sha256_of(file.path)
        if known is not None and file.sha256 != known:
            raise DownloadError(
                f"{entry.alias} is registered with the sha256 {known} for {file.path}, and the hub "
                f"has {file.sha256}: it was replaced there, or the entry is wrong. To take what "
                f"the hub has, name it {entry.repo}/{file.path}"
            )


@dataclass(frozen=True)
class Difference:
    """Where an entry of the registry and the hub disagree."""

    alias: str
    what: str  # "size", "sha256 of x.gguf", or "file"
    registered: str
    found: str


def check(entry: ModelEntry) -> Iterator[Difference]:
    """Ask the hub about a registered model: one difference after the other, none where it agrees.

    Raises DownloadError where the hub does not answer, or has no such repository.
    """
    there = {file.path: file for file in hub.listing(entry.repo, entry.revision).files}
    for path in entry.files:
        if path not in there:
            yield Difference(entry.alias, "file", path, "not there")
        elif entry.sha256_of(path) not in (None, there[path].sha256):
            yield Difference(
                entry.alias,
                f"sha256 of {path}",
                str(entry.sha256_of(path)),
                str(there[path].sha256),
            )
    size = sum(there[path].size for path in entry.files if path in there)
    if entry.size not in (None, size) and set(entry.files) <= set(there):
        yield Difference(entry.alias, "size", str(entry.size), str(size))


@dataclass(frozen=True)
class Proposal:
    """A draft for a target: its name, as `resolve` takes it, and why this one."""

    name: str
    why: str


def propose_draft(target: str, registry: Registry | None = None) -> Proposal:
    """A draft for a target that the user has named.

    The one that the registry pairs with it; else the smallest model in the cache that has the same
    vocabulary, and at most half the target's size. Raises ModelError if there is neither.
    """
    known = registry or load_registry()
    named = names.parse(target, known)
    entry = _entry_of(named, known)
    draft = entry and known.draft_for(entry.alias)
    if entry is not None and draft is not None:
        return Proposal(draft.alias, f"the registry pairs it with {entry.alias}")
    from ggufspec.models.header import read_header

    paths = locate(target, known)
    if paths is not None:
        wanted = read_header(paths[0])
        models = sorted(local.cached_models(), key=lambda model: model.n_bytes)
        for model in models:
            if 2 * model.n_bytes > wanted.n_bytes:
                break
            try:
                found = read_header(model.paths[0])
            except ModelError:
                continue  # a damaged file in the cache drafts for nobody
            if found.vocabulary == wanted.vocabulary:
                return Proposal(
                    str(model.paths[0]), f"the smallest in the cache with {target}'s vocabulary"
                )
    raise ModelError(
        f"no draft is known for {target}: the registry pairs none with it, and no smaller model in "
        "the cache has its vocabulary; name one with --draft"
    )


def _entry_of(named: names.Named, known: Registry) -> ModelEntry | None:
    """The registered model that is meant, or another quantization of it in the same repository."""
    if isinstance(named, HubFiles) and named.entry is not None:
        return named.entry
    if isinstance(named, LocalFile):
        content = named.path.resolve()
        for entry in known.models.values():
            paths = local.find(HubFiles(entry.repo, entry.files, entry.revision))
            if paths and paths[0].resolve() == content:
                return entry
        return None
    return next((entry for entry in known.models.values() if entry.repo == named.repo), None)
