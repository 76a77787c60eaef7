"""From the names that users give models to files, with a bar while one is downloaded."""

from __future__ import annotations

from pathlib import Path

import click

from ggufspec.cli.progress import late_bars

AUTO_DRAFT = "auto"

offline_option = click.option(
    "--offline",
    is_flag=True,
    help="Take models from this machine only; download none. [default: HF_HUB_OFFLINE]",
)


def find_model(name: str, *, offline: bool) -> Path:
    """The file that a name means, downloaded if need be. Raises GgufspecError."""
    from ggufspec.models.pull import resolve

    with late_bars() as bars:
        return resolve(name, offline=offline, progress=bars.download)


def find_models(target: str, draft: str | None, *, offline: bool) -> tuple[Path, Path | None]:
    """The files of a pair; for the draft `auto`, one is proposed, and named on stderr."""
    target_path = find_model(target, offline=offline)
    if draft == AUTO_DRAFT:
        draft = proposed_draft(target)
    return target_path, None if draft is None else find_model(draft, offline=offline)


def proposed_draft(target: str) -> str:
    """The name of a draft for a target; says on stderr which. Raises ModelError."""
    from ggufspec.models.pull import propose_draft

    proposal = propose_draft(target)
    click.echo(f"ggufspec: drafting with {proposal.name}: {proposal.why}", err=True)
    return proposal.name
