"""The settings of a text from a command's options, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.options import DRAFTING, Command, Option, gathered, ignore_eos_option, stop_option
from ggufspec.cli.sampling_options import SAMPLING, to_generate, to_json
from ggufspec.models.heads import DraftFile

if TYPE_CHECKING:
    from ggufspec.engine.file_sampling import FileSampling
    from ggufspec.engine.options import CheckedOptions

_OF_DRAFT_MODELS = {
    "draft_temperature": "--draft-temp",
    "n_threads_draft": "-td",
    "n_gpu_layers_draft": "-ngld",
}
_OF_DRAFTS = {"n_draft": "--draft-n", "verify": "--verify"}  # of n-gram lookup too


def text_options(*others: Option) -> Callable[[Command], Command]:
    """All settings of a text, and `others`, as the command's argument `settings`."""
    return gathered(
        "settings",
        *DRAFTING,
        stop_option,
        ignore_eos_option,
        *SAMPLING,
        *others,
        make=lambda **given: to_generate(given),
    )


def checked(settings: dict[str, Any]) -> CheckedOptions:
    """The same settings for `Engine.begin`. Raises OptionError."""
    from ggufspec.engine.options import CheckedOptions

    return CheckedOptions.of(settings)  # type: ignore[arg-type]


def with_file_sampling(
    settings: Mapping[str, Any], found: FileSampling, *, verbose: bool
) -> dict[str, Any]:
    """The settings, with the target file's values for sampling options that were not given.

    Prints them if `verbose`, and what the file sets but is not used.
    """
    from ggufspec.engine.file_sampling import sampling_text

    taken: Any = {name: each for name, each in found.options.items() if not was_given(name)}
    if verbose and taken:
        render.note(f"sampling from the file: {sampling_text(taken)}")
    for line in found.notes:
        render.note(line)
    return {**settings, **taken}


def drafter_without_model(settings: dict[str, Any]) -> str:
    """The drafting strategy where there is no draft model."""
    given: str | None = settings["drafter"]
    return given or ("auto" if settings["n_draft"] == "auto" else "none")


def check_needs_no_draft(settings: dict[str, Any], *, compare: bool = False) -> None:
    """Raises UsageError if an option was given that needs a draft model."""
    options = dict(_OF_DRAFT_MODELS)
    has_no_drafts = drafter_without_model(settings) in ("none", "model")
    if has_no_drafts:
        options.update(_OF_DRAFTS)
    given = [option for name, option in options.items() if was_given(name)]
    if compare and has_no_drafts:
        given.append("--compare")
    if given:
        raise click.UsageError(f"{given[0]} needs a draft model: name one with --draft")


def was_given(name: str) -> bool:
    """Whether the user gave this parameter of the command."""
    context = click.get_current_context()
    return context.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)


def conditions(
    paths: tuple[Path, DraftFile | None], settings: dict[str, Any], load_settings: dict[str, Any]
) -> dict[str, Any]:
    """What a result depends on, for a JSON document: all settings, and versions."""
    target, draft = paths
    pair = {"target": str(target), "draft": draft and str(draft)}
    return {
        "settings": {**pair, **to_json(settings), **load_settings},
        "versions": render.versions(),
    }
