"""`ggufspec compare`: plain and speculative decoding side by side, live or recorded."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.demo import PROMPTS, WARM_UP_TOKENS, cache_dir_option, size_option, stand_in
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.files import check_writable, write_file
from ggufspec.cli.names import find_models, offline_option
from ggufspec.cli.options import (
    color_option,
    draft_n_option,
    draft_option,
    draft_temperature_option,
    drafter_option,
    ignore_eos_option,
    load_options,
    prompt_options,
    room_for,
    seed_option,
    show_log,
    stop_option,
    target_option,
    verbose_option,
    verify_option,
)
from ggufspec.cli.progress import late_bars, load_with_bars
from ggufspec.cli.run import as_wanted, check_needs_no_draft, check_rule, read_prompt, was_given
from ggufspec.cli.sampling_options import sampling_options, to_generate, to_json
from ggufspec.cli.sections import SectionedCommand
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.bench.race import Lane, Race
    from ggufspec.engine.engine import Engine

_TOLD_EVERY = 0.1  # seconds
_WIDEST = 98  # letters of a line that is to be read
_PROMPT = PROMPTS[2]
# The same text in both lanes; the penalty, since the embedded pair repeats itself without one,
# which would make drafting look better than it is.
_EMBEDDED = {"temperature": 0.0, "repeat_penalty": 1.15}


@click.command(name="compare", cls=SectionedCommand)
@target_option(required=False)
@draft_option("without one, only the text so far drafts")
@offline_option
@size_option
@cache_dir_option
@draft_n_option
@drafter_option
@verify_option
@draft_temperature_option
@prompt_options
@click.option(
    "-n",
    "--n-predict",
    "max_tokens",
    type=click.IntRange(min=1),
    default=defaults.COMPARE_TOKENS,
    show_default=True,
    help="Tokens that each of them writes at most.",
)
@stop_option
@ignore_eos_option
@sampling_options
@seed_option
@load_options
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="How many times as fast the replay is as the race was; 0: only how it ended.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the race to a file: .svg (an animated picture, for a README) or .cast "
    "(for asciinema).",
)
@color_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead: no replay.")
@verbose_option
def command(
    target: str | None,
    draft: str | None,
    offline: bool,
    size: str,
    cache_dir: Path | None,
    n_draft: int | str,
    drafter: str | None,
    verify: str,
    draft_temperature: float | str,
    asked: dict[str, Any],
    max_tokens: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    sampling: dict[str, Any],
    seed: int | None,
    load_settings: dict[str, Any],
    speed: float,
    record: Path | None,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Watch plain and speculative decoding race each other, on the same prompt and seed.

    They run one after the other, plain first, so that neither takes the other's cores; then both
    are replayed in step, with their true timings. What the draft wrote and the target accepted is
    green. Without a terminal, the result is printed as text.

    Without --target, the embedded pair of `ggufspec demo` runs: on a prompt of its own, at
    temperature 0 and with a repeat penalty of 1.15, unless you say otherwise.

    \b
      ggufspec compare
      ggufspec compare --target large.gguf --draft small.gguf -p "Once upon a time"
      ggufspec compare --record race.svg
    """
    if not math.isfinite(speed):
        raise click.BadParameter(f"{speed} is no speed; give a number", param_hint="--speed")
    check_rule(verify)
    _check_contenders(target, draft, drafter, n_draft)
    if record is not None:
        from ggufspec.bench.recording import check_recordable

        check_recordable(record)
        check_writable(record)
    show_log(verbose)
    if target is None:
        ignore_eos = True
        sampling.update({name: value for name, value in _EMBEDDED.items() if not was_given(name)})
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n_draft": n_draft,
        "drafter": drafter,
        "verify": verify,
        "draft_temperature": draft_temperature,
        **to_generate(sampling),
        "seed": secrets.randbits(32) if seed is None else seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
    }
    from ggufspec.engine.options import CheckedOptions

    CheckedOptions.of(settings)  # type: ignore[arg-type]
    text = _PROMPT
    if target is not None or any(asked[name] is not None for name in ("prompt", "prompt_file")):
        text = read_prompt(asked["prompt"], asked["prompt_file"])
    target_path, draft_path = _find(target, draft, offline, size, cache_dir)
    load_settings.update(room_for(n_draft))
    with load_with_bars(target_path, draft_path, load_settings) as engine:
        race = _run(engine, text, as_wanted(engine, text, asked), settings)

    if record is not None:
        from ggufspec.bench.recording import recording

        write_file(record, recording(race, record, speed or 1.0))
        click.echo(f"ggufspec: the race is in {record}", err=True)
    if as_json:
        document = _document(race)
        paths = {"target": str(target_path), "draft": draft_path and str(draft_path)}
        document["settings"] = {**paths, **to_json(settings), **load_settings}
        render.echo_json({**document, "versions": render.versions()})
        return 0
    interrupted = _show(race, speed, color)
    _print_result(race)
    return INTERRUPTED if interrupted else 0


def _check_contenders(
    target: str | None, draft: str | None, drafter: str | None, n_draft: int | str
) -> None:
    """Raises UsageError where there is nobody to race against, or nobody to race."""
    if drafter == "none":
        raise click.UsageError(
            "--drafter none is what the other one does anyway; name one that drafts, such as ngram"
        )
    if target is None:
        if draft is not None:
            raise click.UsageError(
                "--draft needs a --target; without both, the embedded pair is compared"
            )
        return
    for name in ("size", "cache_dir"):
        if was_given(name):
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} is of the embedded pair: leave it or --target out")
    if draft is None:
        drafter = drafter or ("auto" if n_draft == "auto" else "none")
        check_needs_no_draft(drafter, compare=False)
        if drafter == "model":
            raise click.UsageError("--drafter model needs a draft model: name one with --draft")


def _find(
    target: str | None, draft: str | None, offline: bool, size: str, cache_dir: Path | None
) -> tuple[Path, Path | None]:
    """The files of the pair."""
    if target is not None:
        return find_models(target, draft, offline=offline)
    from ggufspec.standin.embedded import embedded_draft

    return stand_in(size, cache_dir), embedded_draft()


def _run(engine: Engine, text: str, prompt: str | list[int], settings: dict[str, Any]) -> Race:
    """Let both run, after a warm-up each. Raises KeyboardInterrupt."""
    from ggufspec.bench.race import PLAIN, SPECULATIVE, Race

    contenders = {PLAIN: {**settings, "drafter": "none"}, SPECULATIVE: settings}
    click.echo(
        "Plain decoding runs first, then speculative decoding: one after the other, so that "
        "neither takes\nthe other's cores. What is shown afterwards has their true timings.",
        err=True,
    )
    for name, own in contenders.items():
        n_tokens = min(WARM_UP_TOKENS, settings["max_tokens"])
        _run_lane(engine, prompt, {**own, "max_tokens": n_tokens}, name, f"{name}, warming up")
    plain, speculative = (
        _run_lane(engine, prompt, own, name, name) for name, own in contenders.items()
    )
    return Race(text, plain, speculative, settings["temperature"])


def _run_lane(
    engine: Engine, prompt: str | list[int], settings: dict[str, Any], name: str, told: str
) -> Lane:
    """Let one of them write, noting when each chunk came."""
    from ggufspec.bench.race import Lane, TimedText

    came = []
    with late_bars() as bars, _Counter(told, settings["max_tokens"]) as counter:

        def on_prompt(whose: str, done: int, total: int) -> None:
            what = "Measuring the pair" if whose == "costs" else f"Reading the prompt ({whose})"
            bars.update(what, done, total)

        stream = engine.stream(prompt, progress=on_prompt, **settings)
        start = perf_counter()
        for chunk in stream:
            at = perf_counter()
            bars.close()
            came.append((at - start, chunk))
            counter.add(len(chunk.tokens), at)
    done = stream.completion
    pieces = tuple(
        TimedText(
            max(at - done.stats.seconds.prompt, 0.0),
            chunk.text,
            len(chunk.tokens),
            any(chunk.drafted),
        )
        for at, chunk in came
    )
    return Lane(name, pieces, done.tokens, done.finish_reason, done.stats)


class _Counter:
    """Tells on a terminal how many tokens there are by now.

    A line of our own: a bar with a thread would take time from those who run.
    """

    def __init__(self, name: str, n_most: int) -> None:
        self._name = name
        self._n_most = n_most
        self._n_tokens = 0
        self._told_at = -math.inf
        self._shown = False

    def __enter__(self) -> _Counter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("\r\x1b[K")

    def add(self, n_tokens: int, seconds: float) -> None:
        self._n_tokens += n_tokens
        if seconds - self._told_at >= _TOLD_EVERY and _is_terminal(sys.stderr):
            self._told_at, self._shown = seconds, True
            self._write(f"\r\x1b[K{self._name}: {self._n_tokens} of {self._n_most} tokens")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_terminal(stream: Any) -> bool:
    """Whether more than lines can be written there."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _show(race: Race, speed: float, color: str) -> bool:
    """Both texts, on a terminal as they came. Tells whether the user interrupted the replay."""
    interrupted = False
    if not _is_terminal(sys.stdout):
        from ggufspec.bench.race_text import harmless

        render.tolerate_letters()
        for lane in race.lanes:
            text = race.prompt + lane.text
            click.echo(f"{lane.name}: {harmless(text) if sys.stdout.isatty() else text}\n")
        return interrupted
    from ggufspec.cli.race_view import RaceView

    view = RaceView(race, color=render.wants_color(color, sys.stdout))
    if speed:
        try:
            view.replay(speed)
        except KeyboardInterrupt:
            interrupted = True
    view.end()
    return interrupted


def _print_result(race: Race) -> None:
    from ggufspec.bench.race import verdict

    header = ["", "tokens/s", "speed-up", "accepted", "tokens a round"]
    rows = []
    for lane in race.lanes:
        stats = lane.stats
        speedup = 1.0 if lane is race.plain else race.speedup
        cells = [
            f"{stats.tokens_per_second:.1f}",
            "" if speedup is None else f"{speedup:.2f}",
            f"{stats.acceptance:.1%}" if stats.n_drafted else "",
            f"{stats.mean_length:.2f}",
        ]
        right = [f"{cell:>{len(name)}}" for cell, name in zip(cells, header[1:], strict=True)]
        rows.append([lane.name, *right])
    click.echo()
    render.echo_rows([header, *rows])
    click.echo()
    _say(verdict(race))
    _say(
        "They ran one after the other, plain first, each after a warm-up. One race is noisy: for "
        "numbers to rely on, `ggufspec bench` measures in turns."
    )


def _say(sentence: str) -> None:
    """On lines as wide as the terminal, but not too wide to read."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    click.echo(click.wrap_text(sentence, width))


def _document(race: Race) -> dict[str, Any]:
    """What --json tells."""
    from ggufspec.bench.race import verdict

    document: dict[str, Any] = {"prompt": race.prompt, "order": [lane.name for lane in race.lanes]}
    for lane in race.lanes:
        document[lane.name] = {
            "text": lane.text,
            "tokens": list(lane.tokens),
            "finish_reason": lane.finish_reason,
            "chunks": [
                {
                    "seconds": piece.seconds,
                    "text": piece.text,
                    "n_tokens": piece.n_tokens,
                    "drafted": piece.drafted,
                }
                for piece in lane.pieces
            ],
            **render.stats_json(lane.stats),
        }
    document["speedup"] = race.speedup
    document["same_text"] = race.first_difference is None
    document["parting"] = race.first_difference
    document["verdict"] = verdict(race)
    return document
