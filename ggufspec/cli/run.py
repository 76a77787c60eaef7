"""`ggufspec run`: continues a prompt, or answers it; text on stdout, all else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import INTERRUPTED, render, shared, text_settings
from ggufspec.cli.loading import (
    PairOptions,
    late_bars,
    load_with_bars,
    room_for_drafts,
    usual_text,
    wants_projector,
)
from ggufspec.cli.options import added, gathered, load_options, options
from ggufspec.common.files import check_writable
from ggufspec.common.reading import decoded, read_file, read_text
from ggufspec.errors import PromptError

if TYPE_CHECKING:
    from ggufspec.decoding.types import Round
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.options import CheckedOptions
    from ggufspec.engine.text import Chunk, Completion
    from ggufspec.models.heads import DraftFile


@click.command(name="run", cls=shared.SectionedCommand)
@shared.pair_options("target", "draft", "offline", "yes", draft={"more": shared.LOOKUP})
@gathered("asked", *options("asked"))
@text_settings.text_options(*options("text"))
@load_options("texts", "chats", "images", chat_template={"more": "Implies --chat."})
@added(*options("output", "color", "as_json"), *options("run"))
def command(
    pair: PairOptions,
    asked: dict[str, Any],
    settings: dict[str, Any],
    load_settings: dict[str, Any],
    prediction: Path | None,
    images: tuple[Path, ...],
    prompt_cache: Path | None,
    prompt_cache_ro: bool,
    compare: bool,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Continue a prompt with a target model, accelerated by a draft model.

    The prompt comes from -p, from a file, or from stdin. Text goes to stdout, statistics to stderr.

    \b
      ggufspec run --target large.gguf --draft small.gguf -p "Once upon a time" -n 200
      ggufspec run --target large.gguf --draft small.gguf --chat -p "Who was Napoleon?"
      ggufspec run --target model-with-head.gguf --draft mtp --chat -p "Who was Napoleon?"
      ggufspec run --target 70B-Q3_K_S --draft 8B-Q3_K_L --draft-n 3 --chat -p "Who was Napoleon?"
    """
    if load_settings["chat_template"] is not None or images:
        asked["chat"] = True
    text = read_prompt(asked)
    if prompt_cache_ro and prompt_cache is None:
        raise click.UsageError("--prompt-cache-ro needs --prompt-cache")
    if prompt_cache is not None and not prompt_cache_ro:
        check_writable(prompt_cache)
    predicted = None
    if prediction is not None:
        predicted = read_text(prediction, "the prediction")
    text_settings.check(pair, settings, compare=compare)
    if prompt_cache is None:  # saved cells can only be restored with the same flash attention
        load_settings["usual_text"] = usual_text(
            [(asked["system"] or "") + text], settings["max_tokens"]
        )
    with loaded(pair, settings, load_settings, verbose=verbose) as (engine, paths, settings):
        options = text_settings.checked({**settings, "prediction": predicted})
        prompt = prompt_of(engine, text, asked, images)
        if prompt_cache is not None and (prompt_cache_ro or prompt_cache.exists()):
            engine.restore(prompt_cache)
        without = replace(options, drafter="none")
        plain = generate(engine, prompt, without, None) if compare else None
        if plain is not None and plain.interrupted:
            raise KeyboardInterrupt
        writer = None if as_json else render.TextWriter(color=render.wants_color(color, sys.stdout))
        run = generate(engine, prompt, options, writer)
        stats = run.completion.stats
        speedup = None
        if plain is not None and plain.completion.stats.tokens_per_second:
            speedup = stats.tokens_per_second / plain.completion.stats.tokens_per_second
        if not as_json:
            report(engine, run, speedup, color=color, verbose=verbose)
        else:
            settings["seed"] = run.seed
            settings["prediction"] = prediction
            under = text_settings.conditions(paths, {**settings, **load_settings})
            render.echo_json({**run.document(), "speedup": speedup, **under})
        if prompt_cache is not None and not prompt_cache_ro:  # last: it may fail
            engine.save(prompt_cache, read_by(engine, prompt, run))
    return INTERRUPTED if run.interrupted else 0


def read_by(engine: Engine, prompt: str | Sequence[int], run: Run) -> Sequence[int]:
    """The tokens of prompt and generated text; only the prompt's if the text was shifted."""
    tokens = engine.tokenize(prompt)
    both = [*tokens, *run.completion.tokens]
    return tokens if len(both) > engine.n_ctx else both[: engine.n_ctx - 1]


@contextmanager
def loaded(
    pair: PairOptions, settings: dict[str, Any], load_settings: dict[str, Any], *, verbose: bool
) -> Iterator[tuple[Engine, tuple[Path, DraftFile | None], dict[str, Any]]]:
    """The engine of a pair, its files, and the settings with the sampling of the target's file.

    Adds to `load_settings` the arguments that other options need. Raises GgufspecError, UsageError.
    """
    paths = pair.find(projector=wants_projector(load_settings))
    load_settings |= room_for_drafts(settings["n_draft"])
    from ggufspec.llama import build

    with load_with_bars(*paths, load_settings) as engine:
        settings = text_settings.with_file_sampling(settings, engine.file_sampling, verbose=verbose)
        for reason in filter(None, [*engine.kernels, engine.attention] if verbose else []):
            render.note(reason)
        if "CPU" in engine.pair.target.model.places and (slow := build.notice()):
            render.note(slow)
        if verbose and engine.pair.chains_only and settings["tree"] == "auto":
            render.note(engine.pair.chains_only)
        yield engine, paths, settings


def report(
    engine: Engine, run: Run, speedup: float | None = None, *, color: str, verbose: bool
) -> None:
    """Print the statistics of a generation; if `verbose`, also of each round."""
    stats = run.completion.stats
    if verbose:
        in_color = render.wants_color(color, sys.stderr)
        text = render.rounds_text(run.rounds, engine.vocab.piece, color=in_color)
        click.echo(text, err=True)
        render.echo(render.details_text(stats), err=True)
    render.echo(render.stats_line(stats, speedup), err=True)
    if run.completion.advice:
        render.note(run.completion.advice)


@dataclass(frozen=True)
class Run:
    completion: Completion
    rounds: Sequence[Round]
    seed: int
    interrupted: bool

    def document(self) -> dict[str, Any]:
        return {
            "text": self.completion.text,
            "tokens": list(self.completion.tokens),
            "finish_reason": "interrupted" if self.interrupted else self.completion.finish_reason,
            **render.stats_json(self.completion.stats),
            "n_prompt_reused": self.completion.stats.n_prompt_reused,  # see --prompt-cache
            "advice": self.completion.advice,
        }


def generate(
    engine: Engine,
    prompt: str | list[int],
    options: CheckedOptions,
    writer: render.TextWriter | None,
) -> Run:
    """Generate a text, written as it comes. Ctrl-C ends it and keeps the text so far.

    Raises GgufspecError, and KeyboardInterrupt if there is no text yet.
    """
    interrupted = False

    def write(chunk: Chunk) -> None:
        bars.close()
        if writer is not None:
            writer.write(chunk)

    with (
        late_bars() as bars,
        engine.begin(prompt, replace(options, progress=bars.prompt)) as stream,
    ):
        try:
            for chunk in stream:
                write(chunk)
        except KeyboardInterrupt:
            stream.close()
            if not stream.completion.tokens:
                raise  # during prompt processing: there is no text to report on
            interrupted = True
            for chunk in stream:  # what came meanwhile
                write(chunk)
    if writer is not None:
        writer.finish()
    return Run(stream.completion, stream.rounds, stream.seed, interrupted)


def read_prompt(asked: dict[str, Any]) -> str:
    """The prompt from an option, a file or stdin. Raises PromptError if empty or not UTF-8."""
    prompt: str | None = asked["prompt"]
    path: Path | None = asked["prompt_file"]
    if prompt is not None and path is not None:
        raise click.UsageError("give the prompt with -p or with -f, not both")
    if prompt is not None:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:  # the option has bytes that are not UTF-8
            raise PromptError(
                f"the prompt from -p is not UTF-8 at character {error.start}; convert it to UTF-8 "
                "first"
            ) from error
    else:
        where = "stdin" if path is None or str(path) == "-" else str(path)
        if where == "stdin" and sys.stdin.isatty():
            raise click.UsageError("give a prompt: with -p, with -f, or on stdin")
        data = read_file(path or Path("-"), "the prompt file", PromptError)
        # Editors and echo add a newline at the end, some a byte order mark at the beginning:
        # neither is part of the prompt.
        prompt = decoded(data, f"the prompt from {where}").removesuffix("\n").removesuffix("\r")
    if not (prompt or asked["chat"] or asked["system"] is not None):  # messages may be empty
        raise PromptError("the prompt is empty; give at least one character, with -p, -f or stdin")
    return prompt


def prompt_of(
    engine: Engine, text: str, asked: dict[str, Any], images: Sequence[Path] = ()
) -> str | list[int]:
    """The prompt unchanged, or rendered as a message of a chat. Raises PromptError."""
    if not asked["chat"] and asked["system"] is None:
        return text
    from ggufspec.engine.chat_template import conversation
    from ggufspec.engine.images import with_images

    *before, last = conversation([text], asked["system"])
    return engine.render([*before, with_images(last, images)])
