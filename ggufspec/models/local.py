"""Parses names of models; finds and lists models in caches; removes them from the hub's.

It does so without huggingface_hub's slow import.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from ggufspec.errors import CacheError, ModelError
from ggufspec.models import other_caches, quants
from ggufspec.models.header import read_header
from ggufspec.models.heads import is_head
from ggufspec.models.registry import REPO, REVISION, ModelEntry, Registry

_HUB = re.compile(
    rf"(?P<repo>{REPO})(?:@(?P<early>{REVISION}))?"
    rf"(?::(?P<quant>[\w.-]+)|/(?P<path>[^@:\\]+))?(?:@(?P<late>{REVISION}))?"
)
_URL = re.compile(
    rf"https?://(?:huggingface|hf)\.co/(?P<repo>{REPO})/(?:resolve|blob)/(?P<revision>{REVISION})/"
    r"(?P<path>[^?#]+)(?:[?#].*)?"
)
_PREFIXES = ("hf://", "hf:", "https://huggingface.co/", "https://hf.co/", "hf.co/")
_ONLY_A_PATH = re.compile(r"[A-Za-z]:[\\/]|[.~/\\]|.*\\")  # C:\ and C:/ ./ ../ ~/ / \


@dataclass(frozen=True)
class HubFiles:
    repo: str
    files: tuple[str, ...]
    revision: str = "main"
    may_be_path: bool = False  # the user may have meant a local path


@dataclass(frozen=True)
class HubQuant:
    """The one model of a quantization in a repository on the hub; None: see `quants.usual`."""

    repo: str
    quant: str | None
    revision: str = "main"
    may_be_path: bool = False


Named = Path | ModelEntry | HubFiles | HubQuant


def local_file(name: str) -> Path | None:
    """The path `name` if it is an existing file or folder, else None."""
    if not name:
        return None
    try:
        path = Path(name).expanduser()
        return path if path.is_file() or path.is_dir() else None  # not a device
    except (OSError, RuntimeError, ValueError):  # no home folder, or an invalid file name
        return None


def parse(name: str, registry: Registry) -> Named:
    """The model that a name refers to.

    A local file, if it exists; else a registered model; else files on the hub: `user/repo`,
    `user/repo:QUANT` or `user/repo/file.gguf`, also with the prefix `hf:`, with an `@revision`, or
    as the URL of a file; else a model that Ollama has. Raises ModelError.
    """
    if (path := local_file(name)) is not None:
        return path
    if (entry := registry.get(name)) is not None:
        return entry
    if match := _URL.fullmatch(name):
        return _files(match["repo"], unquote(match["path"]), match["revision"])
    prefix = next((prefix for prefix in _PREFIXES if name.lower().startswith(prefix)), "")
    match = None if _ONLY_A_PATH.match(name) else _HUB.fullmatch(name[len(prefix) :])
    if match is None or (match["early"] and match["late"]):
        if not name or name.lower().endswith(".gguf") or _ONLY_A_PATH.match(name) or "/" in name:
            raise _no_file(name)
        if (path := other_caches.ollama_model(name)) is not None:
            return path
        raise ModelError(f"there is no file {name}, and {registry.unknown(name)}")
    revision = match["early"] or match["late"] or "main"
    if match["quant"] and match["quant"].lower() != "latest":
        return HubQuant(match["repo"], match["quant"], revision)
    if match["path"]:
        return _files(match["repo"], match["path"], revision, may_be_path=not prefix)
    if name.lower().endswith(".gguf") and not prefix:
        raise _no_file(name)
    return HubQuant(match["repo"], None, revision, may_be_path=not prefix)


def is_repository(name: str) -> bool:
    """Whether a name is that of a repository on the hub, without a quantization or a file."""
    prefix = next((prefix for prefix in _PREFIXES if name.lower().startswith(prefix)), "")
    match = None if local_file(name) else _HUB.fullmatch(name[len(prefix) :])
    return match is not None and not (match["quant"] or match["path"])


def _files(repo: str, path: str, revision: str, *, may_be_path: bool = False) -> HubFiles:
    if not quants.stays_within(path):
        raise _no_file(f"{repo}/{path}")
    if not path.lower().endswith(".gguf"):
        raise ModelError(f"{repo}/{path} is not a GGUF file; name one, or {repo}:QUANT")
    return HubFiles(repo, quants.whole_split(path), revision, may_be_path=may_be_path)


def _no_file(name: str) -> ModelError:
    return ModelError(
        f"there is no file {name or repr(name)}; name the path of a GGUF model, a registered name "
        "(`ggufspec models list`), user/repo:QUANT or user/repo/file.gguf"
    )


# The layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_cache() -> Path:
    """The hub's cache folder: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if chosen := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(chosen)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def repo_folder(repo: str) -> Path:
    return hub_cache() / f"models--{repo.replace('/', '--')}"


def find(
    wanted: ModelEntry | HubFiles | HubQuant, *, heads: bool = False, nearest: bool = True
) -> tuple[Path, ...] | None:
    """The files of a model if all are on this machine, else None; in other programs' caches, too.

    heads: see `quants.choose`. nearest: without a quantization, any will do, the usual one best.
    """
    for there in _places(wanted.repo, wanted.revision):
        files: tuple[str, ...] = ()
        if isinstance(wanted, HubQuant):
            models = list(_by_header(there, _complete(there)))
            kinds = quants.kinds_of(heads)
            if wanted.quant is None and nearest:
                sizes = {name: path.stat().st_size for name, path in there.items()}
                found = quants.usual(models, sizes, math.inf, *kinds)
            else:
                found = quants.of_quant(models, wanted.quant or quants.USUAL, *kinds)
            files = found[0].files if len(found) == 1 else ()
        elif all(file in there for file in wanted.files):
            files = wanted.files
        elif all(file.replace("/", "_") in there for file in wanted.files):  # llama.cpp's cache
            files = tuple(file.replace("/", "_") for file in wanted.files)
        if files:
            return tuple(there[file] for file in files)
    return None


def _places(repo: str, revision: str) -> Iterator[dict[str, Path]]:
    folders = [repo_folder(repo)]
    if chosen := os.environ.get("LLAMA_CACHE"):  # newer versions of llama.cpp: as the hub's cache
        folders.append(Path(chosen) / folders[0].name)
    for folder in filter(None, (_snapshot(folder, revision) for folder in folders)):
        found = (path for path in folder.glob("**/*") if path.is_file())
        yield {path.relative_to(folder).as_posix(): path for path in found}
    if revision == "main":
        yield from other_caches.copies_of(repo)


def cached_models() -> Iterator[tuple[Path, ...]]:
    """The files, first the one to load, of each complete model in each snapshot of the cache."""
    snapshots = sorted(hub_cache().glob("models--*--*/snapshots/*"))
    for folder in (*snapshots, *other_caches.model_folders()):
        yield from models_in(folder, "**/*")


def models_in(
    folder: Path, pattern: str = "*", kind: quants.Kind | None = None
) -> Iterator[tuple[Path, ...]]:
    """The files of each complete GGUF model in a folder; by default without its subfolders.

    kind: only of models that are of this kind by their names.
    """
    files = (path for path in folder.glob(pattern) if path.is_file())
    for model in _complete(path.relative_to(folder).as_posix() for path in files):
        if kind in (None, model.kind):
            yield tuple(folder / file for file in model.files)


def remove(paths: Iterable[Path]) -> int:
    """Remove files from every snapshot of the cache, and their content. Returns bytes freed.

    If a link points out of the cache, only the link is removed.
    """
    n_freed = 0
    for path in paths:
        content = path.resolve()
        snapshots = next(parent for parent in path.parents if parent.name == "snapshots")
        blobs = (snapshots.parent / "blobs").resolve()
        others = filter(Path.is_symlink, snapshots.rglob("*"))
        links = [other for other in others if other.resolve() == content]
        for gone in {path, *links, *([content] if content.parent == blobs else [])}:
            with contextlib.suppress(FileNotFoundError):
                n_freed += 0 if gone.is_symlink() else gone.stat().st_size
                gone.unlink()
    return n_freed


def _snapshot(folder: Path, revision: str) -> Path | None:
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None  # not usable as the name of a folder
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _complete(files: Iterable[str]) -> list[quants.ModelFiles]:
    return [model for model in quants.group(files) if not model.missing]


def _by_header(
    there: Mapping[str, Path], models: Iterable[quants.ModelFiles]
) -> Iterator[quants.ModelFiles]:
    """The models. Unsure names: the header decides; adapters and bare vocabularies are left out."""
    for model in models:
        found = model
        with contextlib.suppress(ModelError):  # damaged: loading it says so
            if model.kind == "unsure":
                header = read_header(there[model.files[0]])
                if header.values.get("general.type", "model") != "model" or not header.tensors:
                    continue  # an adapter, or a bare vocabulary
                found = replace(model, kind="head" if is_head(header) else "model")
        yield found


def _expanded(path: str) -> Path:
    try:
        return Path(os.path.expandvars(path)).expanduser()
    except RuntimeError as error:
        raise CacheError(
            f"the folder {path} for the hub's cache cannot be found: set HF_HOME or HF_HUB_CACHE"
        ) from error
