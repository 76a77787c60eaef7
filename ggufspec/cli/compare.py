"""`ggufspec compare`: plain and speculative decoding side by side, replayed or recorded."""

from __future__ import annotations

import math
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from ggufspec.bench.race import N_GRAMS, PLAIN, SPECULATIVE, Lane, Race, TimedText, verdict
from ggufspec.cli import INTERRUPTED, render, shared, text_settings
from ggufspec.cli.loading import PairOptions, late_bars, load_with_bars, room_for_drafts, usual_text
from ggufspec.cli.options import added, gathered, load_options, options
from ggufspec.cli.run import prompt_of, read_prompt
from ggufspec.common.files import check_writable, write_file

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.options import CheckedOptions

_COUNT_EVERY = 0.1  # seconds
_N_WARM_UP = 16  # tokens
_WIDEST = 98  # characters of a line of prose
_ORDER = (
    "Plain decoding runs first, then speculative decoding, so that they do not compete for cores.\n"
    "Afterwards both are replayed with their measured timings."
)
_PROMPT = "Up betimes, and by water to Whitehall,"
# Greedy, so that both texts are the same; with a penalty, because the embedded pair repeats itself
# without one, which would make drafting look better than it is.
_EMBEDDED = {"temperature": 0.0, "repeat_penalty": 1.15}


@click.command(name="compare", cls=shared.SectionedCommand)
@shared.pair_options(
    target={"required": False}, draft={"more": f"{shared.LOOKUP} {shared.SEVERAL}"}
)
@gathered("asked", *options("asked"))
@text_settings.text_options(
    *options("text", "temperature", "seed", "stop", "ignore_eos"), *options("compared")
)
@load_options()
@added(*options("compare"), *options("output", "color", "verbose"))
def command(
    pair: PairOptions,
    asked: dict[str, Any],
    settings: dict[str, Any],
    load_settings: dict[str, Any],
    speed: float,
    record: Path | None,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Watch plain and speculative decoding side by side, on the same prompt and seed.

    They run one after the other, plain first, so that they do not compete for cores; then both are
    replayed together with their measured timings. Accepted draft tokens are green. Without a
    terminal, the texts and the result are printed. With several drafts, each gets a race of its own
    against plain decoding; the fastest one is shown, and all are ranked.

    Without --target, the embedded pair of `ggufspec demo` runs: by default on a built-in prompt, at
    temperature 0, with a repeat penalty of 1.15.

    \b
      ggufspec compare
      ggufspec compare --target large.gguf --draft small.gguf -p "Once upon a time"
      ggufspec compare --target large.gguf --draft small.gguf,smaller.gguf -p "Once upon a time"
      ggufspec compare --record race.svg
    """
    if not math.isfinite(speed):
        raise click.BadParameter(f"{speed} is not a speed; give a number", param_hint="--speed")
    _check_contenders(pair, settings)
    if record is not None:
        from ggufspec.cli.race_view import check_recordable, recording

        check_recordable(record)
        check_writable(record)
    if pair.target is None:
        usual = {
            name: value for name, value in _EMBEDDED.items() if not text_settings.was_given(name)
        }
        settings |= {**usual, "ignore_eos": True}
    if settings["seed"] is None:
        settings["seed"] = secrets.randbits(32)
    is_given = pair.target is not None or {asked["prompt"], asked["prompt_file"]} != {None}
    text = read_prompt(asked) if is_given else _PROMPT
    pairs = pair.find_each()
    load_settings |= room_for_drafts(settings["n_draft"])
    load_settings["usual_text"] = usual_text([text], settings["max_tokens"])
    races: dict[str, Race] = {}  # by the draft's name; "" for a single draft
    steps: dict[str, float] = {}  # milliseconds of a draft step
    given = settings
    for i, (name, paths) in enumerate(pairs.items(), 1):
        if name:
            render.note(f"draft {i} of {len(pairs)}: {name}")
        with load_with_bars(*paths, load_settings) as engine:
            settings = text_settings.with_file_sampling(
                given, engine.file_sampling, verbose=verbose
            )
            if name:
                from ggufspec.engine.calibration import calibrate

                with late_bars() as bars:
                    engine.run(partial(calibrate, engine.pair, bars.prompt))
                steps[name] = 1e3 * engine.pair.profile.costs.step
            if not races:
                render.echo(_ORDER, err=True)
            prompt = prompt_of(engine, text, asked)
            races[name] = _run(engine, text, prompt, text_settings.checked(settings))
    races = dict(sorted(races.items(), key=lambda each: -(each[1].speedup or 0.0)))
    best, race = next(iter(races.items()))

    if record is not None:
        write_file(record, recording(race, record, speed or 1.0))
        render.note(f"the race is in {record}")
    if as_json:
        under = text_settings.conditions(pairs[best], {**settings, **load_settings})
        document = {**_document(race), **under}
        if steps:
            document["ranking"] = _ranking(races, steps)
        render.echo_json(document)
        return 0
    interrupted = _show(race, speed, color)
    _print_result(races, steps)
    return INTERRUPTED if interrupted else 0


def _check_contenders(pair: PairOptions, settings: dict[str, Any]) -> None:
    if settings["drafter"] == "none":
        raise click.UsageError(
            "--drafter none is plain decoding, which runs anyway; name another one, such as ngram"
        )
    text_settings.check(pair, settings)
    if pair.target is None:
        return
    for name in filter(text_settings.was_given, ("size", "cache_dir")):
        raise click.UsageError(
            f"{text_settings.flag_of(name)} is for the embedded pair: leave it or --target out"
        )
    if pair.draft is None and settings["drafter"] == "model":
        raise click.UsageError("--drafter model needs a draft model: name one with --draft")


def _run(engine: Engine, text: str, prompt: str | list[int], options: CheckedOptions) -> Race:
    """Run plain and speculative decoding, each after a warm-up. Raises KeyboardInterrupt."""
    has_model = engine.pair.draft is not None and options.drafter != "ngram"
    named = SPECULATIVE if has_model else N_GRAMS
    contenders = {PLAIN: replace(options, drafter="none"), named: options}
    for name, own in contenders.items():
        warm_up = replace(own, max_tokens=min(_N_WARM_UP, own.max_tokens or _N_WARM_UP))
        _run_lane(engine, prompt, f"{name}, warming up", warm_up)
    plain, speculative = (_run_lane(engine, prompt, *each) for each in contenders.items())
    temperature, divergence = options.sampling.effective_temperature, None
    if temperature == 0 and plain.tokens != speculative.tokens:
        from ggufspec.engine import scoring

        render.note("the texts differ: measuring how passes over several tokens round")
        both = plain.tokens, speculative.tokens
        divergence = scoring.compare(engine, engine.tokenize(prompt), *both, options)
    return Race(text, plain, speculative, temperature, divergence)


def _run_lane(engine: Engine, prompt: str | list[int], name: str, options: CheckedOptions) -> Lane:
    came = []
    n_tokens, shown_at = 0, -math.inf
    # No progress bar: its thread would take time from the generation.
    counts = render.is_terminal(sys.stderr)
    with (
        late_bars() as bars,
        engine.begin(prompt, replace(options, progress=bars.prompt)) as stream,
    ):
        start = perf_counter()
        try:
            for chunk in stream:
                at = perf_counter()
                bars.close()
                came.append((at, chunk))
                n_tokens += len(chunk.tokens)
                if counts and at - shown_at >= _COUNT_EVERY:
                    shown_at = at
                    _overwrite(f"{name}: {n_tokens} of {options.max_tokens} tokens")
        finally:
            if counts:
                _overwrite("")
    done = stream.completion
    began = start + done.stats.seconds.prompt
    pieces = tuple(
        TimedText(max(at - began, 0.0), chunk.text, len(chunk.tokens), any(chunk.drafted))
        for at, chunk in came
    )
    return Lane(name, pieces, done.tokens, done.finish_reason, done.stats)


def _overwrite(line: str) -> None:
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()


def _show(race: Race, speed: float, color: str) -> bool:
    render.tolerate_letters()
    if render.is_terminal(sys.stdout):
        from ggufspec.cli.race_view import show

        return show(race, speed, color=render.wants_color(color, sys.stdout))
    for lane in race.lanes:
        render.echo(f"{lane.name}: {race.prompt}{lane.text}\n")
    return False


def _print_result(races: Mapping[str, Race], steps: Mapping[str, float]) -> None:
    best, race = next(iter(races.items()))
    header = ["tokens/s", "speed-up", "accepted", "tokens/round"]
    render.echo()
    if steps:
        rows = []
        for name, each in races.items():
            plain = f"{each.plain.stats.tokens_per_second:.1f}"
            cells = _cells(each.speculative, each.speedup)
            rows.append([name, plain, *cells, f"{steps[name]:.2f}"])
        render.echo_table(["draft", "plain", *header, "ms/step"], rows)
        is_faster = (race.speedup or 0.0) > 1 and race.speculative.stats.n_accepted > 0
        _say(f"Fastest: {best}." if is_faster else "No draft is faster than plain decoding.")
    else:
        lanes = [(race.plain, 1.0), (race.speculative, race.speedup)]
        rows = [[lane.name, *_cells(lane, speedup)] for lane, speedup in lanes]
        render.echo_table(["", *header], rows)
    _say(verdict(race))
    _say(
        "They ran one after the other, each after a warm-up. A single race is noisy: for reliable "
        "numbers, `ggufspec bench` repeats it in alternation."
    )


def _cells(lane: Lane, speedup: float | None) -> list[str]:
    stats = lane.stats
    return [
        f"{stats.tokens_per_second:.1f}",
        "" if speedup is None else f"{speedup:.2f}",
        f"{stats.acceptance:.1%}" if stats.n_drafted else "",
        f"{stats.mean_length:.2f}",
    ]


def _ranking(races: Mapping[str, Race], steps: Mapping[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "draft": name,
            "speedup": race.speedup,
            "plain_tokens_per_second": race.plain.stats.tokens_per_second,
            "ms_per_step": steps[name],
            **render.stats_json(race.speculative.stats),
        }
        for name, race in races.items()
    ]


def _say(sentence: str) -> None:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    render.echo(click.wrap_text(sentence, width))


def _document(race: Race) -> dict[str, Any]:
    document: dict[str, Any] = {"prompt": race.prompt, "order": [PLAIN, SPECULATIVE]}
    for name, lane in zip(document["order"], race.lanes, strict=True):
        told = {"text": lane.text, "tokens": list(lane.tokens), "finish_reason": lane.finish_reason}
        chunks = [asdict(piece) for piece in lane.pieces]
        document[name] = {**told, "chunks": chunks, **render.stats_json(lane.stats)}
    document["speedup"] = race.speedup
    document["same_text"] = race.first_difference is None
    document["parting"] = race.first_difference
    document["divergence"] = race.divergence and race.divergence.document
    document["verdict"] = verdict(race)
    return document
