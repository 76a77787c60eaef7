"""Proposes a draft for a target: its own head, or the best draft that is on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ggufspec.errors import ModelError, VocabError
from ggufspec.models import local
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


@dataclass(frozen=True)
class DraftProposal:
    """A draft for a target, and the reason. name: an argument of `resolve`, or MTP."""

    name: str
    why: str


def propose_draft(target: str, registry: Registry | None = None) -> DraftProposal:
    """A draft for a target, from the registry, the target's folder and the cache.

    In this order: the MTP head in its file, or beside it; a DFlash or EAGLE-3 head beside it; the
    newest trimmed draft whose tokens the target has; the draft that the registry pairs with it; the
    smallest model with the same vocabulary; the model with the largest overlap. Reads only headers.
    Raises ModelError if none fits.
    """
    known = registry or load_registry()
    named = local.parse(target, known)
    paths = locate(target, known)
    drafts: list[_Candidate] = []
    if paths:
        wanted = read_header(paths[0])
        check_model(wanted)
        if head_of(wanted, None):
            return DraftProposal(MTP, "its own multi-token-prediction head")
        headers = list(_headers_here(wanted))
        if head := _head_beside(wanted, headers):
            return head
        drafts = list(_drafts_among(wanted, headers))
    trimmed = [each for each in drafts if trim_of(each.header) and each.overlap > _WHOLE_OVERLAP]
    if trimmed:
        newest = max(trimmed, key=lambda each: each.path.stat().st_mtime)
        return DraftProposal(str(newest.path), trim_text(trim_of(newest.header) or {}))
    entry = _entry_of(named, known)
    draft = entry and known.draft_for(entry.alias)
    if entry is not None and draft is not None:
        return DraftProposal(draft.alias, f"the registry pairs it with {entry.alias}")
    if same := next((each for each in drafts if each.has_same_vocabulary), None):
        return DraftProposal(str(same.path), f"the smallest here with {target}'s vocabulary")
    others = [each for each in drafts if each.overlap >= LEAST_OVERLAP]
    if other := max(others, key=lambda each: each.n_common, default=None):
        why = f"of another vocabulary, with {other.overlap:.0%} of the smaller one in common"
        return DraftProposal(str(other.path), why)
    raise ModelError(
        f"no draft is known for {target}: the registry pairs none with it, and no model beside it "
        "or in the cache has its vocabulary and at most half of its size; name one with "
        f"--draft, or make one: `ggufspec trim {target} --layers LIST -o draft.gguf`"
    )


@dataclass(frozen=True)
class _Candidate:
    """A cheap model, and the overlap of its vocabulary with the target's."""

    path: Path
    header: Header
    n_common: int
    overlap: float  # common tokens, as a share of the smaller vocabulary
    has_same_vocabulary: bool


def _headers_here(wanted: Header) -> Iterator[Header]:
    """Yields headers of files beside the target and of smaller files in caches, by size."""
    beside = wanted.paths[0].parent
    models = (
        *local.models_in(beside),
        *local.heads_below(beside),
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


def _head_beside(wanted: Header, headers: Sequence[Header]) -> DraftProposal | None:
    """A head from the target's folder, or one in it, that fits the target; None: there is none."""
    found: dict[str, Path] = {}
    for header in headers:
        path = header.paths[0]
        with suppress(ModelError, VocabError):  # for another target
            if wanted.paths[0].parent in path.parents and (head := head_of(wanted, header)):
                found.setdefault(head.kind, path)
    kinds = {"mtp": "an MTP head", "dflash": "a DFlash head", "eagle3": "an EAGLE-3 head"}
    for kind, what in kinds.items():
        if kind in found:
            return DraftProposal(str(found[kind]), f"{what} beside the target")
    return None


def _drafts_among(wanted: Header, headers: Sequence[Header]) -> Iterator[_Candidate]:
    """Yields the models that are cheap enough to draft for `wanted`."""
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
