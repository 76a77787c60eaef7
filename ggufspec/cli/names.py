"""Turns names of models into files: downloads them, proposes a draft, writes a stand-in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from ggufspec.cli import render
from ggufspec.cli.progress import late_bars
from ggufspec.common import defaults
from ggufspec.common.files import default_cache_dir
from ggufspec.models.head_facts import MTP
from ggufspec.models.heads import DraftFile

AUTO_DRAFT = "auto"
MOST_DRAFTS = 16  # maximum number that a command ranks
_EMBEDDED_PARAMS = 7.2  # millions


@dataclass(frozen=True)
class PairOptions:
    """The models that the command line names; without a target, the embedded pair."""

    target: str | None
    draft: str | None
    offline: bool
    size: str = defaults.DEMO_SIZE
    cache_dir: Path | None = None
    draft_of_draft: str | None = None

    @property
    def further(self) -> dict[str, Path]:
        """Further models, as arguments of `load`: the file of the draft's draft, if it has one."""
        if self.draft_of_draft is None:
            return {}
        if self.draft is None:
            raise click.UsageError("--draft-of-draft needs --draft: name the model it drafts for")
        return {"draft_of_draft": find_model(self.draft_of_draft, offline=self.offline)}

    def check(self) -> None:
        """Raise UsageError for a draft without a target."""
        if self.target is None and self.draft is not None:
            raise click.UsageError("--draft needs --target: the embedded pair has its own draft")

    def find(self) -> tuple[Path, DraftFile | None]:
        """The files of target and draft; prints what "auto" chose. Raises GgufspecError."""
        if self.target is None:
            from ggufspec.standin.embedded import embedded_draft

            return stand_in(self.size, self.cache_dir), embedded_draft()
        target = find_model(self.target, offline=self.offline)
        draft = proposed_draft(self.target) if self.draft == AUTO_DRAFT else self.draft
        return target, None if draft is None else find_draft(draft, offline=self.offline)

    def find_each(self) -> dict[str, tuple[Path, DraftFile | None]]:
        """The files of a pair for each draft of a comma-separated list, by the draft's name.

        A single draft has the name "". Raises GgufspecError, BadParameter.
        """
        from ggufspec.models.header import read_header
        from ggufspec.models.local import local_file

        drafts = [name.strip() for name in (self.draft or "").split(",")]
        if len(drafts) == 1 or local_file(self.draft or "") is not None:  # "a,b.gguf"
            return {"": self.find()}
        if len(drafts) > MOST_DRAFTS:
            raise _bad_drafts(f"{len(drafts)} drafts were given; give at most {MOST_DRAFTS}")
        pairs = [replace(self, draft=name).find() for name in drafts]
        found = [draft for _, draft in pairs if draft]
        files = [Path(MTP) if draft == MTP else read_header(draft).paths[0] for draft in found]
        known: set[Path] = set()
        for name, file in zip(drafts, files, strict=True):
            if file.resolve() in known:
                raise _bad_drafts(f"{name} is given twice ({file}); give each draft once")
            known.add(file.resolve())
        stems = [file.stem for file in files]
        is_unique = len(set(stems)) == len(stems)
        return dict(zip(stems if is_unique else map(str, files), pairs, strict=True))


def _bad_drafts(what: str) -> click.BadParameter:
    return click.BadParameter(what, param_hint="--draft")


def find_model(name: str, *, offline: bool) -> Path:
    """The file of a named model, downloaded if it is missing. Raises GgufspecError."""
    from ggufspec.models.pull import resolve

    with late_bars() as bars:
        return resolve(name, offline=offline, progress=bars.download)


def find_draft(name: str, *, offline: bool) -> DraftFile:
    """The file of a draft; MTP for the head in the target's own file."""
    return MTP if name == MTP else find_model(name, offline=offline)


def proposed_draft(target: str) -> str:
    """The name of a draft for a target, also printed on stderr. Raises ModelError."""
    from ggufspec.models.draft_proposal import propose_draft

    proposal = propose_draft(target)
    render.note(f"drafting with {proposal.name}: {proposal.why}")
    return proposal.name


def stand_in(size: str, cache_dir: Path | None) -> Path:
    """The path of the padded target, which is written if it does not exist yet."""
    from ggufspec.standin import padded

    n_params, folder = padded.parse_size(size), cache_dir or default_cache_dir()
    dimensions, file = padded.plan_dimensions(n_params), padded.padded_file(n_params)
    render.echo(
        f"The large model is a stand-in: a model of {_EMBEDDED_PARAMS} M parameters, trained on "
        f"old novels, padded with zeros\nto the cost of {file.n_params / 1e6:,.0f} M "
        f"({dimensions.n_layers} layers, width {dimensions.n_embd}). It writes what the small one "
        "would, only slower.\n",
        err=True,
    )
    if (found := padded.cached_target(n_params, folder)) is not None:
        return found
    render.echo(f"Writing it once: {file.n_bytes / 1e6:,.0f} MB in {folder} ...", err=True)
    with late_bars() as bars:
        return padded.padded_target(
            n_params, folder, lambda done, of: bars.update("Writing", done, of, unit="bytes")
        )
