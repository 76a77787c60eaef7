"""The options of a text (drafting, sampling, constraints), with llama.cpp's names; their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.loading import PairOptions
from ggufspec.cli.options import Command, Option, gathered, groups
from ggufspec.common.facts import plain
from ggufspec.models.heads import DraftFile

if TYPE_CHECKING:
    from ggufspec.engine.options import CheckedOptions, FileSampling


def to_generate(**sampling: Any) -> dict[str, Any]:
    """The options for `generate`, with constraints from files, not checked. Raises UsageError."""
    from ggufspec.engine.options import CONSTRAINTS

    constraints = (name for each in CONSTRAINTS for name in (each, f"{each}_file"))
    given = [name for name in constraints if sampling.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(map(flag_of, given))} were given; give one of them")
    for name in [name for name in sampling if name.endswith("_file")]:
        text = sampling.pop(name)
        if text is not None:
            sampling[name.removesuffix("_file")] = text
    if sampling.get("max_tokens") == -2:  # llama.cpp's word for it
        sampling |= {"max_tokens": None, "context_shift": False}
    return sampling


_OF_DRAFT_MODELS = (
    *("draft_temperature", "n_threads_draft", "n_gpu_layers_draft", "n_ctx_draft"),
    *("override_tensor_draft", "n_cpu_moe_draft", "n_cpu_ffn_draft", "lora_draft"),
    "mmproj_draft",
)
_NEEDS_DRAFT = "{} needs a draft model: name one with --draft"
_OF_DRAFTS = ("n_draft", "tree", "verify")  # they also affect n-gram lookup


def text_options(*own: Option) -> Callable[[Command], Command]:
    """The options of a text, with the command's `own` ones, as `settings`."""
    listed = groups("drafting", "limits", "sampling", "constraints")
    return gathered("settings", *listed, *own, make=to_generate)


def checked(settings: Mapping[str, Any]) -> CheckedOptions:
    """The settings, checked, as options for `Engine.begin`. Raises OptionError."""
    from ggufspec.engine.options import CheckedOptions

    return CheckedOptions.of(settings)  # type: ignore[arg-type]


def with_file_sampling(
    settings: Mapping[str, Any], found: FileSampling, *, verbose: bool
) -> dict[str, Any]:
    """The settings, with the target file's values for sampling options that were not given.

    If `verbose`, prints them, and values of the file that are not used.
    """
    from ggufspec.engine.options import sampling_text

    taken: Any = {name: each for name, each in found.options.items() if not was_given(name)}
    if verbose and taken:
        render.note(f"sampling from the file: {sampling_text(taken)}")
    for line in found.notes:
        render.note(line)
    return {**settings, **taken}


def check(pair: PairOptions, settings: dict[str, Any], *, compare: bool = False) -> None:
    """Check the settings of a text and of its pair, before models are loaded.

    Raises UsageError for a draft without a target, or an option that needs a missing draft; and
    OptionError.
    """
    options = checked(settings)
    pair.check()
    if pair.draft is not None or pair.target is None:
        return
    has_no_drafts = options.drafter_name(has_draft=False) in ("none", "model")
    refuse_without_draft(*(_OF_DRAFTS if has_no_drafts else ()))
    if compare and has_no_drafts:
        raise click.UsageError(_NEEDS_DRAFT.format("--compare"))


def refuse_without_draft(*others: str) -> None:
    """Raise UsageError if an option of draft models was given, or one of `others`."""
    for name in (*_OF_DRAFT_MODELS, *others):
        if is_on_command_line(name):
            raise click.UsageError(_NEEDS_DRAFT.format(flag_of(name)))


def was_given(name: str) -> bool:
    context = click.get_current_context()
    return context.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)


def is_on_command_line(name: str) -> bool:
    """Whether a parameter was given on the command line, not only by an environment variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def flag_of(name: str) -> str:
    """The long name of the option that sets a parameter of the command."""
    parameters = click.get_current_context().command.params
    return next(each.opts[-1] for each in parameters if each.name == name)


def conditions(paths: tuple[Path, DraftFile | None], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings and versions that a result depends on, for a JSON document."""
    pair = dict(zip(("target", "draft"), paths, strict=True))
    return {"settings": plain({**pair, **settings}), "versions": render.versions()}
