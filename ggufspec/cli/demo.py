"""`ggufspec demo`: the main job on the embedded pair, with nothing to download."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.options import color_option, draft_n_option, room_for, show_log, verbose_option
from ggufspec.cli.progress import late_bars
from ggufspec.cli.run import Run, generate
from ggufspec.cli.sections import SectionedCommand
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.engine import Engine

PROMPTS = (
    "The prince looked at her and",
    "It was a cold evening in November, and the old house",
    '"My dear Watson," said Holmes,',
    "In the morning they went down to the harbour, where",
)
_MODES = {"plain": "none", "speculative": None}  # and their drafters
WARM_UP_TOKENS = 16
_EMBEDDED_PARAMS = 7.2  # millions


size_option = click.option(
    "--size",
    default=defaults.DEMO_SIZE,
    show_default=True,
    help="Cost of the stand-in target, in parameters: 10M to 8B.",
)

cache_dir_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Where the stand-in is kept. [default: GGUFSPEC_CACHE, or the user's cache folder]",
)


@click.command(name="demo", cls=SectionedCommand)
@size_option
@draft_n_option
@click.option(
    "-n",
    "--n-predict",
    "max_tokens",
    type=click.IntRange(min=1),
    default=defaults.DEMO_TOKENS,
    show_default=True,
    help="Tokens to write for each prompt.",
)
@click.option(
    "--temp",
    "temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Temperature; at 0 both ways write the same text.",
)
@click.option(
    "-s", "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed."
)
@click.option(
    "--runs",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Times that each prompt is continued in each way.",
)
@click.option(
    "-t", "--threads", "n_threads", type=click.IntRange(min=1), help="Threads of the target."
)
@cache_dir_option
@color_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@verbose_option
def command(
    size: str,
    n_draft: int | str,
    max_tokens: int,
    temperature: float,
    seed: int,
    runs: int,
    n_threads: int | None,
    cache_dir: Path | None,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Watch a large model write with the help of a small one; nothing to download.

    A 7 M-parameter model of old novels, padded with zeros until it costs as much as a model of
    --size parameters (a stand-in: it writes no better), is run with and without its 1.5 M draft.
    """
    from ggufspec.engine.load import load
    from ggufspec.standin import padded
    from ggufspec.standin.embedded import embedded_draft

    show_log(verbose)
    target = stand_in(size, cache_dir)
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n_draft": n_draft,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
    }
    writer = None if as_json else render.TextWriter(color=render.wants_color(color, sys.stdout))
    with load(target, embedded_draft(), n_threads=n_threads, **room_for(n_draft)) as engine:
        pairs, interrupted = _perform(engine, list(PROMPTS) * runs, settings, writer)
    if pairs:
        document = _document(pairs, padded.parse_size(size), target, {**settings, "runs": runs})
        if as_json:
            render.echo_json(document)
        else:
            _print_result(document)
    return INTERRUPTED if interrupted else 0


def stand_in(size: str, cache_dir: Path | None) -> Path:
    """The padded target, written first if it is not there yet."""
    from ggufspec.common.files import default_cache_dir
    from ggufspec.standin import padded

    n_params, folder = padded.parse_size(size), cache_dir or default_cache_dir()
    dimensions, file = padded.plan_dimensions(n_params), padded.padded_file(n_params)
    _talk(
        f"The large model is a stand-in: a model of {_EMBEDDED_PARAMS} M parameters, trained on "
        f"old novels, padded with zeros\nto the cost of {file.n_params / 1e6:,.0f} M "
        f"({dimensions.n_layers} layers, width {dimensions.n_embd}). It writes what the small one "
        "would, only slower.\n"
    )
    found = padded.cached_target(n_params, folder)
    if found is not None:
        return found
    _talk(f"Writing it once: {file.n_bytes / 1e6:,.0f} MB in {folder} ...")
    with late_bars() as bars:
        return padded.padded_target(
            n_params, folder, lambda done, of: bars.update("Writing", done, of, unit="bytes")
        )


def _perform(
    engine: Engine, prompts: list[str], settings: dict[str, Any], writer: render.TextWriter | None
) -> tuple[list[tuple[Stats, Stats, bool]], bool]:
    """Continue each prompt plainly, then speculatively: (plain, speculative, same text).

    The two ways take turns, so that a machine that grows slower or faster misleads nobody.
    Also tells whether the user interrupted it.
    """
    pairs: list[tuple[Stats, Stats, bool]] = []
    warm_up = {**settings, "max_tokens": WARM_UP_TOKENS}
    if any(_continue(engine, PROMPTS[0], warm_up, mode, None).interrupted for mode in _MODES):
        return pairs, True
    for prompt in prompts:
        runs: list[Run] = []
        for mode in _MODES:
            runs.append(_continue(engine, prompt, settings, mode, writer))
            if runs[-1].interrupted:
                return pairs, True
        plain, speculative = (run.completion for run in runs)
        pairs.append((plain.stats, speculative.stats, plain.tokens == speculative.tokens))
    return pairs, False


def _continue(
    engine: Engine,
    prompt: str,
    settings: dict[str, Any],
    mode: str,
    writer: render.TextWriter | None,
) -> Run:
    if writer is not None:
        writer.heading(f"{mode}: ", prompt)
    run = generate(engine, prompt, {**settings, "drafter": _MODES[mode]}, writer)
    if writer is not None:
        _talk(f"[{render.stats_line(run.completion.stats)}]\n")
    return run


def _document(
    pairs: list[tuple[Stats, Stats, bool]],
    n_params: int,
    target: Path,
    settings: dict[str, Any],
) -> dict[str, Any]:
    from ggufspec.standin import padded

    dimensions = padded.plan_dimensions(n_params)
    plain = [pair[0] for pair in pairs]
    speculative = [pair[1] for pair in pairs]
    rates = [(one.tokens_per_second, two.tokens_per_second) for one, two, _ in pairs]
    ratios = [two / one for one, two in rates if one > 0]
    return {
        "rows": [
            _row("plain", plain),
            _row("speculative", speculative),
        ],
        "speedup": median(ratios),
        "speedup_spread": [min(ratios), max(ratios)],
        "n_texts": len(pairs),
        "n_same_text": sum(same for _, _, same in pairs),
        "stand_in": {
            "path": str(target),
            "n_bytes": target.stat().st_size,
            "n_params": padded.padded_file(n_params).n_params,
            "n_embd": dimensions.n_embd,
            "n_layer": dimensions.n_layers,
            "n_head": dimensions.n_heads,
            "n_ff": dimensions.n_ff,
        },
        "settings": settings,
        "versions": render.versions(),
    }


def _row(mode: str, runs: Sequence[Stats]) -> dict[str, Any]:
    """Medians of several texts, and the share of their time outside llama_decode."""
    from ggufspec.bench.records import Contender, Measurement
    from ggufspec.bench.summary import summary_of

    texts = [Measurement.of_stats(stats, mode, "", run) for run, stats in enumerate(runs)]
    row = summary_of(Contender(mode, {}), texts)
    return {
        "mode": mode,
        "n_runs": row.n_texts,
        "tokens_per_second": row.median,
        "tokens_per_second_spread": [row.low, row.high],
        "accepted": row.accepted,
        "mean_length": row.mean_length,
        "overhead": median(stats.overhead for stats in runs),
    }


def _print_result(document: dict[str, Any]) -> None:
    plain, speculative = document["rows"]
    low, high = document["speedup_spread"]
    render.echo_table(
        ["", "tokens/s", "speed-up", "accepted", "tokens a round"],
        [
            ["plain", f"{plain['tokens_per_second']:.1f}", "1.00", "", "1.00"],
            [
                "speculative",
                f"{speculative['tokens_per_second']:.1f}",
                f"{document['speedup']:.2f} ({low:.2f} to {high:.2f})",
                f"{speculative['accepted'] or 0:.1%}",
                f"{speculative['mean_length']:.2f}",
            ],
        ],
    )
    n_texts, n_same = document["n_texts"], document["n_same_text"]
    if document["settings"]["temperature"] == 0:
        note = f"Both ways wrote the same text for {n_same} of {n_texts} prompts"
        if n_same < n_texts:
            note += " (batches of other sizes round differently: the others met a near-tie)"
        click.echo(f"{note}.")
    click.echo(
        f"Medians of {n_texts} texts. The large model is a stand-in with the cost of "
        f"{document['stand_in']['n_params'] / 1e6:,.0f} M parameters."
    )


def _talk(message: str) -> None:
    """Tell the user something that is not the product."""
    click.echo(message, err=True)
