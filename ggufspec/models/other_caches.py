"""Finds models that other programs have downloaded: llama.cpp, LM Studio, Ollama. Reads only."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ggufspec.common.facts import json_object
from ggufspec.common.files import platform_folder

_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OLLAMA_NAME = re.compile(r"\w[\w.-]*(?::\w[\w.-]*)?")
_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of Ollama's Linux service
_MOST_MANIFEST = 2**20  # bytes


def copies_of(repo: str) -> Iterator[dict[str, Path]]:
    """Yields what each program has of a repository on the hub: files by their paths there.

    llama.cpp's older cache has "_" for "/" in paths. Ollama's have the names of their tags.
    """
    user, _, name = repo.partition("/")
    for folder in _lm_studio():
        yield {path.relative_to(folder / repo).as_posix(): path for path in _files(folder / repo)}
    start = f"{user}_{name}_"
    for folder in _llama_cpp():
        flat = [path for path in folder.glob("*.gguf") if path.name.startswith(start)]
        yield {path.name.removeprefix(start): path for path in flat}
    for tags in _manifests("hf.co", repo):
        blobs = {f"{name}-{tag.name}.gguf": _blob(tag) for tag in _files(tags, "*")}
        yield {file: path for file, path in blobs.items() if path is not None}


def ollama_model(name: str) -> Path | None:
    """The file of a model that Ollama has by this name, such as llama3.2:1b; None: it has none."""
    if not _OLLAMA_NAME.fullmatch(name):
        return None
    model, _, tag = name.partition(":")
    for folder in _manifests("registry.ollama.ai", f"library/{model}"):
        if (found := _blob(folder / (tag or "latest"))) is not None:
            return found
    return None


def model_folders() -> list[Path]:
    return [*_llama_cpp(), *_lm_studio()]


def _llama_cpp() -> Iterator[Path]:
    if chosen := os.environ.get("LLAMA_CACHE"):
        yield Path(chosen)
    else:
        with suppress(RuntimeError):
            yield platform_folder("cache") / "llama.cpp"


def _lm_studio() -> Iterator[Path]:
    if (home := _home()) is None:
        return
    with suppress(OSError, UnicodeDecodeError):
        chosen = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        yield Path(chosen) / "models"
    yield home / ".lmstudio" / "models"
    yield home / ".cache" / "lm-studio" / "models"


def _manifests(registry: str, model: str) -> Iterator[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        roots = [Path(chosen)]
    else:
        home = _home()
        roots = [] if home is None else [home / ".ollama" / "models"]
        roots += [_SERVICE] if sys.platform == "linux" else []
    for root in roots:
        yield root / "manifests" / registry / model


def _blob(manifest: Path) -> Path | None:
    with suppress(OSError):
        if manifest.stat().st_size > _MOST_MANIFEST:
            return None
        layers = (json_object(manifest.read_bytes()) or {}).get("layers")
        for layer in layers if isinstance(layers, list) else ():
            digest = str(layer.get("digest")) if isinstance(layer, Mapping) else ""
            if digest and layer.get("mediaType") == _MODEL and _DIGEST.fullmatch(digest):
                path = manifest.parents[4] / "blobs" / digest.replace(":", "-")
                return path if path.is_file() else None
    return None


def _files(folder: Path, pattern: str = "**/*.gguf") -> list[Path]:
    with suppress(OSError):
        return [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    return []


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None
