"""Reads the registry of named models and pairs: the shipped TOML file and the user's own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ggufspec.common.files import platform_folder
from ggufspec.common.reading import TOMLDecodeError, parse_toml
from ggufspec.errors import ModelError, OptionError
from ggufspec.models.quants import did_you_mean, stays_within

REGISTRY_VARIABLE = "GGUFSPEC_MODELS"
_FILE_NAME = "models.toml"
_ALIAS = re.compile(r"[A-Za-z0-9][\w.+-]*")
REPO, REVISION = r"[\w.-]+/[\w.-]+", r"refs/pr/\d+|[\w-][\w.-]*"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a model, known before it is downloaded. None: unknown."""

    name: str
    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    n_embd_head: int
    n_vocab: int
    n_ctx: int
    n_experts: int | None = None  # n_ff is the width of one expert
    n_experts_used: int | None = None  # per token
    n_experts_shared: int | None = None  # computed for every token
    n_dense_layers: int | None = None  # layers before the first with experts
    n_ff_dense: int | None = None  # the width of these dense layers
    tied: bool | None = None  # the output matrix is the token embedding
    license: str | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A registered model: where its files are, with their size and hashes."""

    alias: str
    repo: str
    files: tuple[str, ...]  # paths in the repository; several for a split model, in order
    revision: str = "main"
    size: int | None = None  # bytes of all files
    sha256: tuple[str, ...] = ()  # one per file; empty: unknown
    shape: Dimensions | None = None

    def sha256_of(self, file: str) -> str | None:
        """The registered sha256 of one of the files; None: unknown."""
        return dict(zip(self.files, self.sha256, strict=False)).get(file)


@dataclass(frozen=True)
class ModelPair:
    """A target and a draft for it. settings: options of `ggufspec run`."""

    name: str
    target: str
    draft: str
    note: str | None = None
    settings: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Registry:
    """Models and pairs by name; case does not matter."""

    models: Mapping[str, ModelEntry]
    pairs: Mapping[str, ModelPair]

    def get(self, alias: str) -> ModelEntry | None:
        return next(
            (each for name, each in self.models.items() if name.lower() == alias.lower()), None
        )

    def find(self, alias: str) -> ModelEntry:
        """The model of that name. Raises ModelError, which suggests similar ones."""
        if (entry := self.get(alias)) is None:
            raise ModelError(self.unknown(alias))
        return entry

    def unknown(self, alias: str) -> str:
        """The message for a name that is not registered, with similar ones."""
        return (
            f"no model is registered as {alias!r}{did_you_mean(alias, self.models)}; "
            "`ggufspec models list` lists the registered names"
        )

    def pairs_of(self, alias: str) -> tuple[ModelPair, ...]:
        return tuple(pair for pair in self.pairs.values() if alias in (pair.target, pair.draft))

    def draft_for(self, alias: str) -> ModelEntry | None:
        """The draft that a pair has for this model, or for another quantization of it."""
        target = self.find(alias)
        pairs = sorted(self.pairs.values(), key=lambda pair: pair.target != target.alias)
        for pair in pairs:
            shape = self.models[pair.target].shape
            if pair.target == target.alias or (shape is not None and shape == target.shape):
                return self.models[pair.draft]
        return None


def load_registry() -> Registry:
    """The shipped registry, overridden by the user's own, then by each of `$GGUFSPEC_MODELS`.

    Raises OptionError for a file that cannot be read or is invalid.
    """
    package = Path(__file__).parents[1]
    shipped = package / _FILE_NAME  # in a source tree, the file is above the package
    shipped = shipped if shipped.is_file() else package.parent / _FILE_NAME
    own = user_registry_path()
    paths = [own] if own is not None and own.is_file() else []
    chosen = filter(None, os.environ.get(REGISTRY_VARIABLE, "").split(os.pathsep))
    paths += [Path(path).expanduser() for path in chosen]
    texts = [(_FILE_NAME, shipped.read_text(encoding="utf-8"))]
    return parse_registry([*texts, *((str(path), _read(path)) for path in paths)])


def user_registry_path() -> Path | None:
    """The file of a user's own models; None without a home folder."""
    try:
        return platform_folder("config") / "ggufspec" / _FILE_NAME
    except RuntimeError:
        return None


def parse_registry(texts: Iterable[tuple[str, str]]) -> Registry:
    """Parse (file name, TOML text) pairs; later entries replace earlier. Raises OptionError."""
    shapes: dict[str, Dimensions] = {}
    models: dict[str, ModelEntry] = {}
    pairs: dict[str, ModelPair] = {}
    for file, text in texts:
        try:
            content = parse_toml(text)
        except (TOMLDecodeError, RecursionError) as error:
            raise OptionError(f"the registry {file} is not TOML: {error}") from error
        root = _Table(file, "", content)
        root.check_keys({"models", "shapes", "pairs"})
        for name, table in root.tables("shapes"):
            shapes[name] = table.fill(Dimensions, name=name)
        for name, table in root.tables("models"):
            replaced = next((known for known in models if known.lower() == name.lower()), name)
            models.pop(replaced, None)
            models[name] = _entry(name, table, shapes)
        for name, table in root.tables("pairs"):
            pairs[name] = _pair(name, table, models)
    return Registry(models, pairs)


def _entry(name: str, table: _Table, shapes: Mapping[str, Dimensions]) -> ModelEntry:
    if not _ALIAS.fullmatch(name) or name.lower().endswith(".gguf"):
        raise table.wrong("is not a valid name: use letters, digits and . _ + -")
    shape = table.take("shape", str, required=False)
    if shape is not None and shape not in shapes:
        raise table.wrong(f"shape is {shape!r}; there is no [shapes] entry for it", shape, shapes)
    entry = table.fill(ModelEntry, alias=name, shape=shapes.get(shape or ""))
    if not re.fullmatch(REPO, entry.repo):
        raise table.wrong(f"repo is {entry.repo!r}; it must be user/repo")
    if not entry.files or not all(file.lower().endswith(".gguf") for file in entry.files):
        raise table.wrong("files must name at least one file, and GGUF files only")
    if not all(map(stays_within, entry.files)):
        raise table.wrong("files must be paths within the repository")
    if not re.fullmatch(REVISION, entry.revision):
        raise table.wrong(f"revision is {entry.revision!r}; it must be a branch, a tag or a commit")
    if entry.sha256 and len(entry.sha256) != len(entry.files):
        raise table.wrong(f"sha256 has {len(entry.sha256)} values for {len(entry.files)} files")
    for digest in entry.sha256:
        if not _SHA256.fullmatch(digest):
            raise table.wrong(f"sha256 has {digest!r}; it must be 64 lower-case hex digits")
    return entry


def _known(alias: str, table: _Table, entries: Iterable[str]) -> str:
    """The registered spelling of a name; case is ignored. Raises OptionError if there is none."""
    by_lower = {name.lower(): name for name in entries}
    if alias.lower() not in by_lower:
        raise table.wrong(f"{alias!r} is not the name of a model", alias, by_lower.values())
    return by_lower[alias.lower()]


_SETTINGS = {"draft_n", "temp", "ctx_size", "gpu_layers", "gpu_layers_draft"}


def _pair(name: str, table: _Table, models: Iterable[str]) -> ModelPair:
    pair = table.fill(ModelPair, name=name)
    _Table(table.file, f"{table.key}.settings", pair.settings).check_keys(_SETTINGS)
    for option, value in pair.settings.items():
        if type(value) not in (int, float):
            raise table.wrong(f"settings.{option} is {value!r}; it must be a number")
    target = _known(pair.target, table, models)
    return replace(pair, target=target, draft=_known(pair.draft, table, models))


_KINDS: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "bool": (bool, "true or false"),
    "str": (str, "a string"),
    "tuple[str, ...]": (list, "a list of strings"),
    "Mapping[str, int | float]": (dict, "a table"),
}
Record = TypeVar("Record")


class _Table:
    def __init__(self, file: str, key: str, table: object) -> None:
        self.file = file
        self.key = key
        if not isinstance(table, dict):
            raise self.wrong("must be a table")
        self._table = dict(table)

    def tables(self, name: str) -> Iterable[tuple[str, _Table]]:
        found = _Table(self.file, name, self._table.get(name, {}))
        for key, table in found._table.items():
            yield key, _Table(self.file, f'{name}."{key}"', table)

    def fill(self, record: type[Record], **known: object) -> Record:
        """A dataclass with this table's values, checked against the types of its fields."""
        declared = {each.name: each for each in fields(record)}  # type: ignore[arg-type]
        self.check_keys(set(declared) - set(known))
        for name, each in declared.items():
            if name in known:
                continue
            kind, _ = _KINDS[str(each.type).removesuffix(" | None")]
            is_required = each.default is MISSING and each.default_factory is MISSING
            value = self.take(name, kind, required=is_required)
            if value is not None:
                known[name] = tuple(value) if isinstance(value, list) else value
        return record(**known)

    def take(self, name: str, kind: type, *, required: bool) -> Any:
        """Remove a value from the table and return it; None if there is none."""
        value: Any = self._table.pop(name, None)
        if value is None:
            if required:
                raise self.wrong(f"has no {name}; it needs one")
            return None
        fits = type(value) is kind
        if not fits or (kind is list and not all(isinstance(part, str) for part in value)):
            raise self.wrong(f"{name} is {value!r}; it must be {dict(_KINDS.values())[kind]}")
        if kind is int and value < 1:
            raise self.wrong(f"{name} is {value}; it must be at least 1")
        return value

    def check_keys(self, known: set[str]) -> None:
        for key in self._table:
            if key not in known:
                raise self.wrong(f"has an unknown key {key!r}", key, known)

    def wrong(self, what: str, word: str = "", known: Iterable[str] = ()) -> OptionError:
        place = f" [{self.key}]" if self.key else ""
        return OptionError(f"the registry {self.file}:{place} {what}{did_you_mean(word, known)}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"the registry {path} cannot be read: {getattr(error, 'strerror', None) or error} "
            f"(your own, or from the environment variable {REGISTRY_VARIABLE})"
        ) from error
