"""`ggufspec run`: continue a prompt, or answer it. The text goes to stdout, the talk to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.files import read_prompt_file
from ggufspec.cli.names import find_models, offline_option
from ggufspec.cli.options import (
    color_option,
    draft_n_option,
    draft_option,
    draft_temperature_option,
    drafter_option,
    explaining_option,
    ignore_eos_option,
    load_options,
    max_tokens_option,
    prompt_options,
    room_for,
    seed_option,
    show_log,
    stop_option,
    target_option,
    verify_option,
)
from ggufspec.cli.progress import late_bars, load_with_bars
from ggufspec.cli.sampling_options import sampling_options, to_generate, to_json
from ggufspec.cli.sections import SectionedCommand
from ggufspec.errors import PromptError

if TYPE_CHECKING:
    from ggufspec.decoding.types import Round
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.generation import Completion


@click.command(name="run", cls=SectionedCommand)
@target_option()
@draft_option("without one, only the text so far drafts")
@offline_option
@draft_n_option
@drafter_option
@verify_option
@draft_temperature_option
@prompt_options
@max_tokens_option
@stop_option
@ignore_eos_option
@sampling_options
@seed_option
@load_options
@click.option(
    "--compare", is_flag=True, help="First decode without the draft, unseen, to tell the speed-up."
)
@color_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of the text."
)
@explaining_option
def command(
    target: str,
    draft: str | None,
    offline: bool,
    n_draft: int | str,
    drafter: str | None,
    verify: str,
    draft_temperature: float | str,
    asked: dict[str, Any],
    max_tokens: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    sampling: dict[str, Any],
    seed: int | None,
    load_settings: dict[str, Any],
    compare: bool,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Continue a prompt with a target model, helped by a draft model.

    The prompt comes from -p, from a file, or from stdin. Text goes to stdout, statistics to stderr.

    \b
      ggufspec run --target large.gguf --draft small.gguf -p "Once upon a time" -n 200
      ggufspec run --target large.gguf --draft small.gguf --chat -p "Who was Napoleon?"
      ggufspec run --target 70B-Q3_K_S --draft 8B-Q3_K_L --draft-n 3 --chat -p "Who was Napoleon?"
    """
    text = read_prompt(asked["prompt"], asked["prompt_file"])
    check_rule(verify)
    show_log(verbose)

    load_settings.update(room_for(n_draft))
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n_draft": n_draft,
        "drafter": drafter,
        "verify": verify,
        "draft_temperature": draft_temperature,
        **to_generate(sampling),
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    from ggufspec.engine.options import CheckedOptions

    # What is wrong with them is known before the models are read.
    CheckedOptions.of(settings)  # type: ignore[arg-type]
    if draft is None:
        check_needs_no_draft(drafter or ("auto" if n_draft == "auto" else "none"), compare=compare)
    target_path, draft_path = find_models(target, draft, offline=offline)
    engine = load_with_bars(target_path, draft_path, load_settings)
    with engine:
        wanted = as_wanted(engine, text, asked)
        plain = generate(engine, wanted, {**settings, "drafter": "none"}, None) if compare else None
        if plain is not None and plain.interrupted:
            raise KeyboardInterrupt
        writer = None if as_json else render.TextWriter(color=render.wants_color(color, sys.stdout))
        run = generate(engine, wanted, settings, writer)
        if run.interrupted and not run.completion.tokens:
            raise KeyboardInterrupt  # the prompt was still being read: there is nothing to tell
    speedup = None
    if plain is not None and plain.completion.stats.tokens_per_second:
        speedup = run.completion.stats.tokens_per_second / plain.completion.stats.tokens_per_second
    if as_json:
        document = run.document()
        document["speedup"] = speedup
        paths = {"target": str(target_path), "draft": draft_path and str(draft_path)}
        document["settings"] = {**paths, **to_json(settings), "seed": run.seed, **load_settings}
        document["versions"] = render.versions()
        render.echo_json(document)
    else:
        if verbose:
            click.echo(render.rounds_text(run.rounds), err=True)
            click.echo(render.details_text(run.completion.stats), err=True)
        click.echo(render.stats_line(run.completion.stats, speedup), err=True)
        if run.completion.advice:
            click.echo(f"ggufspec: {run.completion.advice}", err=True)
    return INTERRUPTED if run.interrupted else 0


class Run:
    """A generation that has ended, one way or the other."""

    def __init__(
        self, completion: Completion, rounds: Sequence[Round], seed: int, *, interrupted: bool
    ) -> None:
        self.completion = completion
        self.rounds = rounds
        self.seed = seed
        self.interrupted = interrupted

    def document(self) -> dict[str, Any]:
        """What --json tells of it."""
        return {
            "text": self.completion.text,
            "tokens": list(self.completion.tokens),
            "finish_reason": "interrupted" if self.interrupted else self.completion.finish_reason,
            **render.stats_json(self.completion.stats),
            "advice": self.completion.advice,
        }


def generate(
    engine: Engine,
    prompt: str | list[int],
    settings: dict[str, Any],
    writer: render.TextWriter | None,
) -> Run:
    """Generate, writing the text as it comes. Ctrl-C ends it with what there is so far."""
    interrupted = False
    with late_bars() as bars:

        def on_prompt(whose: str, done: int, total: int) -> None:
            what = "Measuring the pair" if whose == "costs" else f"Reading the prompt ({whose})"
            bars.update(what, done, total)

        stream = engine.stream(prompt, progress=on_prompt, **settings)
        try:
            for chunk in stream:
                bars.close()
                if writer is not None:
                    writer.write(chunk)
        except KeyboardInterrupt:
            interrupted = True
    if writer is not None:
        writer.finish()
    return Run(stream.completion, stream.rounds, stream.seed, interrupted=interrupted)


def read_prompt(prompt: str | None, path: Path | None) -> str:
    """The prompt from where the user has it. Raises PromptError for bytes that are not UTF-8."""
    if prompt is not None and path is not None:
        raise click.UsageError("give the prompt with -p or with -f, not both")
    if prompt is not None:
        return prompt
    where = "stdin" if path is None or str(path) == "-" else str(path)
    if where == "stdin" and sys.stdin.isatty():
        raise click.UsageError("give a prompt: with -p, with -f, or on stdin")
    data = read_prompt_file(path or Path("-"))
    try:
        # Editors and echo end a file with a newline, some begin it with a byte order mark: neither
        # is part of the prompt.
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt from {where} is not UTF-8: byte {error.start} is "
            f"0x{data[error.start]:02x}; convert it to UTF-8 first"
        ) from error


def as_wanted(engine: Engine, text: str, asked: dict[str, Any]) -> str | list[int]:
    """The prompt as it is, or as a message of a chat. Raises PromptError."""
    if not asked["chat"] and asked["system"] is None:
        return text
    system = [{"role": "system", "content": asked["system"]}] if asked["system"] is not None else []
    return engine.render([*system, {"role": "user", "content": text}])


def check_rule(verify: str) -> None:
    """Raises BadParameter for a rule that is wrong on purpose."""
    if verify.startswith("_"):
        raise click.BadParameter(
            f"{verify!r} is wrong on purpose: it is for `ggufspec audit` alone",
            param_hint="--verify",
        )


_ABOUT_THE_DRAFT = {
    "draft_temperature": "--draft-temp",
    "n_threads_draft": "-td",
    "n_gpu_layers_draft": "-ngld",
}
_ABOUT_DRAFTING = {"n_draft": "--draft-n", "verify": "--verify"}  # of a drafter without a model too


def check_needs_no_draft(drafter: str, *, compare: bool) -> None:
    """Options that say something of a draft model need one. Raises UsageError."""
    options = dict(_ABOUT_THE_DRAFT)
    if drafter in ("none", "model"):
        options.update(_ABOUT_DRAFTING)
    given = [option for name, option in options.items() if was_given(name)]
    if compare and drafter in ("none", "model"):
        given.append("--compare")
    if given:
        raise click.UsageError(f"{given[0]} needs a draft model: name one with --draft")


def was_given(name: str) -> bool:
    """Whether the user gave this parameter of the command."""
    context = click.get_current_context()
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
