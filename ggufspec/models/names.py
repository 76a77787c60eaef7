"""Parses the name of a model: a local file, a registered name, or files on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ggufspec.errors import ModelError
from ggufspec.models.quants import whole_split
from ggufspec.models.registry import ModelEntry, Registry, TrimEntry

_REVISION = r"refs/pr/\d+|[\w.-]+"
_HUB = re.compile(
    rf"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<early>{_REVISION}))?"
    rf"(?::(?P<quant>[\w.-]+)|/(?P<path>[^@:\\]+))?(?:@(?P<late>{_REVISION}))?"
)
_URL = re.compile(
    rf"https?://(?:huggingface|hf)\.co/(?P<repo>[\w.-]+/[\w.-]+)/(?:resolve|blob)/(?P<revision>{_REVISION})/"
    r"(?P<path>[^?#]+)(?:[?#].*)?"
)
_PREFIXES = ("hf://", "hf:", "https://huggingface.co/", "https://hf.co/", "hf.co/")
_ONLY_A_PATH = re.compile(r"[A-Za-z]:[\\/]|[.~/\\]|.*\\")  # C:\ and C:/ ./ ../ ~/ / \


@dataclass(frozen=True)
class HubFiles:
    """Files of one model in a repository on the hub."""

    repo: str
    files: tuple[str, ...]
    revision: str = "main"
    may_be_path: bool = False  # the user may have meant a local path


@dataclass(frozen=True)
class HubQuant:
    """The one model of a quantization in a repository on the hub."""

    repo: str
    quant: str
    revision: str = "main"


Named = Path | ModelEntry | HubFiles | HubQuant | TrimEntry


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

    A local file, if it exists; else a registered model; else files on the hub: `user/repo:QUANT` or
    `user/repo/file.gguf`, also with the prefix `hf:`, with an `@revision`, or as the URL of a file.
    Raises ModelError.
    """
    if (path := local_file(name)) is not None:
        return path
    if (entry := registry.get(name) or registry.get_trim(name)) is not None:
        return entry
    if match := _URL.fullmatch(name):
        return _files(match["repo"], unquote(match["path"]), match["revision"])
    prefix = next((prefix for prefix in _PREFIXES if name.lower().startswith(prefix)), "")
    match = None if _ONLY_A_PATH.match(name) else _HUB.fullmatch(name[len(prefix) :])
    if match is None or (match["early"] and match["late"]):
        if not name or name.lower().endswith(".gguf") or _ONLY_A_PATH.match(name) or "/" in name:
            raise _no_file(name)
        raise ModelError(f"there is no file {name}, and {registry.unknown(name)}")
    revision = match["early"] or match["late"] or "main"
    if match["quant"]:
        return HubQuant(match["repo"], match["quant"], revision)
    if match["path"]:
        return _files(match["repo"], match["path"], revision, may_be_path=not prefix)
    if name.lower().endswith(".gguf") and not prefix:
        raise _no_file(name)
    raise ModelError(
        f"{name} is a repository: name one of its models, such as {match['repo']}:Q4_K_M or "
        f"{match['repo']}/file.gguf"
    )


def _files(repo: str, path: str, revision: str, *, may_be_path: bool = False) -> HubFiles:
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise _no_file(f"{repo}/{path}")
    if not path.lower().endswith(".gguf"):
        raise ModelError(f"{repo}/{path} is not a GGUF file; name one, or {repo}:QUANT")
    return HubFiles(repo, whole_split(path), revision, may_be_path=may_be_path)


def _no_file(name: str) -> ModelError:
    return ModelError(
        f"there is no file {name or repr(name)}; name the path of a GGUF model, a registered name "
        "(`ggufspec models list`), user/repo:QUANT or user/repo/file.gguf"
    )
