"""Proposes drafts for a target: its own head, those on this machine, and those on the hub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ggufspec.common.reading import read_toml
from ggufspec.errors import DownloadError, ModelError, VocabError
from ggufspec.models import hub, local, quants
from ggufspec.models.head_facts import MTP
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import check_model, head_of, is_head
from ggufspec.models.pull import locate
from ggufspec.models.registry import ModelEntry, Registry, load_registry
from ggufspec.models.shape import shape_of
from ggufspec.models.trim_facts import trim_of, trim_text
from ggufspec.models.vocabulary_overlap import n_common

MOST_FILES = 24  # headers to read, of the smallest files; each takes up to 0.15 s
MOST_COST = 1 / 2  # of the bytes per target pass; Qwen2.5 0.5B for 1.5B: 0.4
LEAST_OVERLAP = 0.3  # of vocabularies; with less, too few tokens can be drafted
_WHOLE_OVERLAP = 0.99  # below 1 because of padding tokens
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


def propose_draft(target: str, registry: Registry | None = None) -> DraftProposal:
    """The first of `proposals`, without asking the hub. Raises ModelError if there is none."""
    found = next(proposals(target, registry, offline=True), None)
    if found is None:
        raise no_draft(target)
    return found


def proposals(
    target: str, registry: Registry | None = None, *, offline: bool = False
) -> Iterator[DraftProposal]:
    """Yields drafts for a target: of its folder, caches, the registry and, if not offline, the hub.

    In the order of what is expected to be fastest: the MTP head in its file; a head beside it, or
    in its repository (MTP, DFlash, EAGLE-3); the newest trimmed draft whose tokens the target has;
    the draft that the registry pairs with it; known heads and drafts for its architecture and size;
    the smallest model with its vocabulary; the model with the largest overlap. Reads only headers.
    """
    known = registry or load_registry()
    named = local.parse(target, known)
    paths = locate(target, known)
    wanted = read_header(paths[0]) if paths else None
    drafts: list[_Candidate] = []
    if wanted is not None:
        check_model(wanted)
        if head_of(wanted, None):
            yield DraftProposal(MTP, "its own multi-token-prediction head")
        headers = list(_headers_here(wanted))
        yield from _heads_beside(wanted, headers)
        drafts = list(_drafts_among(wanted, headers))
    asks = not (offline or hub.is_offline())
    if asks:
        with suppress(hub.Transient):
            yield from _in_its_repository(named)
    trimmed = [each for each in drafts if trim_of(each.header) and each.overlap > _WHOLE_OVERLAP]
    for newest in sorted(trimmed, key=lambda each: each.path.stat().st_mtime, reverse=True):
        yield DraftProposal(str(newest.path), trim_text(trim_of(newest.header) or {}))
    yield from _registered(_entry_of(named, known), known)
    if wanted is not None:
        with suppress(hub.Transient):
            yield from known_drafts(wanted, known, asks=asks)
    for same in (each for each in drafts if each.has_same_vocabulary):
        yield DraftProposal(str(same.path), f"the smallest here with {target}'s vocabulary")
    others = [each for each in drafts if not each.has_same_vocabulary]
    others = [each for each in others if each.overlap >= LEAST_OVERLAP]
    for other in sorted(others, key=lambda each: -each.n_common):
        why = f"of another vocabulary, with {other.overlap:.0%} of the smaller one in common"
        yield DraftProposal(str(other.path), why)


def no_draft(target: str) -> ModelError:
    return ModelError(
        f"no draft is known for {target}: the registry pairs none with it, and no model beside it "
        "or in the cache has its vocabulary and at most half of its size; name one with "
        f"--draft, or make one: `ggufspec trim {target} --layers LIST -o draft.gguf`"
    )


def _in_its_repository(named: local.Named) -> Iterator[DraftProposal]:
    """Heads and drafts in the target's repository, if it is from the hub."""
    if isinstance(named, Path):
        folder = next((each for each in named.parents if each.name == "snapshots"), None)
        repo = folder and folder.parent.name.removeprefix("models--").replace("--", "/", 1)
        revision = "main"
    else:
        repo, revision = named.repo, named.revision
    if repo:
        yield from _in_repository(repo, revision)


def _in_repository(repo: str, revision: str) -> Iterator[DraftProposal]:
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


def known_drafts(target: Header, registry: Registry, *, asks: bool) -> Iterator[DraftProposal]:
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


def _registered(entry: ModelEntry | None, known: Registry) -> Iterator[DraftProposal]:
    draft = entry and known.draft_for(entry.alias)
    if entry is not None and draft is not None:
        n_bytes = draft.size if local.find(draft) is None else 0
        yield DraftProposal(draft.alias, f"the registry pairs it with {entry.alias}", n_bytes)


@dataclass(frozen=True)
class _Candidate:
    path: Path
    header: Header
    n_common: int
    overlap: float  # common tokens, as a share of the smaller vocabulary
    has_same_vocabulary: bool


def _folder_of(target: Header) -> Path:
    """The target's folder; above it, the snapshot or folder that has one for each quantization."""
    folder = target.paths[0].parent
    for above in folder.parents:
        if above.parent.name == "snapshots":
            return above
    return folder.parent if quants.quant_of(f"{folder.name}/") else folder


def _headers_here(wanted: Header) -> Iterator[Header]:
    """Yields headers of files beside the target and of smaller files in caches, by size."""
    beside = _folder_of(wanted)
    models = (
        *local.models_in(beside),
        *local.models_in(wanted.paths[0].parent),
        *local.models_in(beside, "*/*", "head"),
        *local.cached_models(),
    )
    sizes = {
        model[0]: sum(path.stat().st_size for path in model)
        for model in {model[0].resolve(): model for model in models}.values()
    }
    used = sorted(
        (size, path)
        for path, size in sizes.items()
        if size < wanted.n_bytes or (beside in path.parents and path != wanted.paths[0])
    )
    for _, path in used[:MOST_FILES]:
        with suppress(ModelError):  # damaged
            yield read_header(path)


def _heads_beside(wanted: Header, headers: Sequence[Header]) -> Iterator[DraftProposal]:
    found: dict[str, Path] = {}
    for header in headers:
        path = header.paths[0]
        with suppress(ModelError, VocabError):  # for another target
            if _folder_of(wanted) in path.parents and (head := head_of(wanted, header)):
                found.setdefault(head.kind, path)
    kinds = {"mtp": "an MTP head", "dflash": "a DFlash head", "eagle3": "an EAGLE-3 head"}
    for kind, what in kinds.items():
        if kind in found:
            yield DraftProposal(str(found[kind]), f"{what} beside the target")


def _drafts_among(wanted: Header, headers: Sequence[Header]) -> Iterator[_Candidate]:
    most = MOST_COST * shape_of(wanted).n_pass_bytes
    for header in headers:
        try:
            is_smaller = header.n_bytes < wanted.n_bytes
            is_cheap = is_smaller and shape_of(header).n_pass_bytes <= most
        except ModelError:
            continue  # not a language model
        if is_cheap and _writes_text(header):
            same = header.vocabulary == wanted.vocabulary
            n, n_smaller = n_common(wanted, header), min(len(wanted.tokens), len(header.tokens))
            yield _Candidate(header.paths[0], header, n, n / max(n_smaller, 1), same)


def _writes_text(header: Header) -> bool:
    """Whether a file is a whole decoder: no head, encoder, embedding model or bare vocabulary."""
    of, values = header.architecture, header.values
    others = (f"{of}.pooling_type", f"{of}.decoder_start_token_id")
    is_decoder = values.get(f"{of}.attention.causal", True) and values.keys().isdisjoint(others)
    is_whole = any(tensor.name == "token_embd.weight" for tensor in header.tensors)
    return is_whole and not is_head(header) and bool(is_decoder and header.tokens)


def _entry_of(named: local.Named, known: Registry) -> ModelEntry | None:
    """The registered model, or another quantization of it in the same repository."""
    if isinstance(named, ModelEntry):
        return named
    if isinstance(named, Path):
        content = named.resolve()
        for entry in known.models.values():
            paths = local.find(entry)
            if paths and paths[0].resolve() == content:
                return entry
        return None
    return next((entry for entry in known.models.values() if entry.repo == named.repo), None)
