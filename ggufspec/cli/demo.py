"""`ggufspec demo`: plain and speculative decoding of the embedded pair; nothing to download."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click

from ggufspec.cli import INTERRUPTED, render, shared
from ggufspec.cli.loading import PairOptions, load_with_bars
from ggufspec.cli.parameters import AT_LEAST_1, COUNT, NOT_NEGATIVE, THREADS, gathered, only, option
from ggufspec.cli.run import generate
from ggufspec.cli.text_settings import checked
from ggufspec.common import defaults
from ggufspec.common.facts import counted
from ggufspec.decoding.sampling_options import Sampling

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.text import Completion

PROMPTS: Final = (
    "Up betimes, and by water to Whitehall,",
    '"My dear Watson," said Holmes,',
    "A fox and a wolf once lived together in the forest, and",
    "It was past midnight when the old gentleman",
)
GREEDY_PROMPT: Final = PROMPTS[0]
WARM_UP_TOKENS: Final = 16
# Without these settings, models this small repeat themselves or lose the thread.
_SAMPLING: Final = {"min_p": 0.1, "repeat_penalty": 1.15}


@click.command(name="demo", cls=shared.SectionedCommand)
@shared.size_option
@gathered(
    "settings",
    *only(shared.DRAFTING, "n_draft"),
    option(
        "-n --n-predict max_tokens",
        "Tokens to generate for each prompt.",
        type=AT_LEAST_1,
        default=defaults.DEMO_TOKENS,
    ),
    option(
        "--temp temperature",
        "Temperature of the texts that are measured; 0: greedy.",
        type=NOT_NEGATIVE,
        default=Sampling.temperature,
    ),
    option("-s --seed", "Seed.", type=COUNT, default=0),
)
@option("--runs", "Texts for each prompt and mode.", type=click.IntRange(1, 100), default=1)
@option("-t --threads n_threads", "Threads for the target.  [default: auto]", type=THREADS)
@shared.cache_dir_option
@shared.color_option
@shared.json_option
@shared.log_option
def command(
    size: str,
    settings: dict[str, Any],
    runs: int,
    n_threads: int | None,
    cache_dir: Path | None,
    color: str,
    as_json: bool,
) -> int:
    """Watch a large model generate faster with a small draft model, without a download.

    The large model is a stand-in: a 7 M-parameter model of old novels, padded with zeros to the
    cost of --size parameters; it writes no better. It continues four prompts with and without its
    1.5 M draft, and one of them at temperature 0, where both texts are the same, up to
    rounding.
    """
    from ggufspec.engine.scoring import compare

    pair = PairOptions(None, None, True, size, cache_dir)
    target, draft = pair.find()
    settings |= {**_SAMPLING, "ignore_eos": True}
    writer = None if as_json else render.TextWriter(color=render.wants_color(color, sys.stdout))
    texts: dict[str, list[Stats]] = {"plain": [], "speculative": []}
    greedy, interrupted = None, False
    room = pair.load_settings(settings["n_draft"])
    with load_with_bars(target, draft, {"n_threads": n_threads, **room}) as engine:
        try:
            _both(engine, {**settings, "max_tokens": WARM_UP_TOKENS}, PROMPTS[0], None, "")
            for run in range(runs):
                for prompt in PROMPTS:
                    seeded = {**settings, "seed": settings["seed"] + run}
                    for mode, text in _both(engine, seeded, prompt, writer, "").items():
                        texts[mode].append(text.stats)
            cold = {**settings, "temperature": 0.0}
            greedy_texts = _both(engine, cold, GREEDY_PROMPT, writer, " at temperature 0")
            plain, speculative = greedy_texts.values()
            both = plain.tokens, speculative.tokens
            found = compare(engine, engine.tokenize(GREEDY_PROMPT), *both, checked(cold))
            greedy = {"prompt": GREEDY_PROMPT, "text": plain.text, "same_text": found is None}
            greedy["divergence"] = found and found.document
            verdict = f"the texts differ {found.reason}" if found else "both wrote the same text"
        except KeyboardInterrupt:
            interrupted = True
    if texts["plain"]:
        rates = [[stats.tokens_per_second for stats in each] for each in texts.values()]
        ratios = [fast / slow for slow, fast in zip(*rates, strict=True) if slow > 0]
        document = {
            "rows": [_row(mode, stats) for mode, stats in texts.items()],
            "speedup": median(ratios),
            "speedup_spread": [min(ratios), max(ratios)],
            "n_texts": len(texts["plain"]),
            "greedy": greedy,
            "stand_in": _stand_in(size, target),
            "settings": {**settings, "runs": runs},
            "versions": render.versions(),
        }
        if as_json:
            render.echo_json(document)
        else:
            _print_result(document)
            if greedy is not None:
                render.echo(f"At temperature 0, {verdict}.")
    return INTERRUPTED if interrupted else 0


def _both(
    engine: Engine,
    settings: dict[str, Any],
    prompt: str,
    writer: render.TextWriter | None,
    how: str,
) -> dict[str, Completion]:
    """Continues a prompt with plain, then speculative decoding. Raises KeyboardInterrupt."""
    found = {}
    for mode, drafter in (("plain", "none"), ("speculative", None)):
        if writer is not None:
            writer.heading(f"{mode}{how}: ", prompt)
        run = generate(engine, prompt, checked({**settings, "drafter": drafter}), writer)
        if writer is not None:
            render.echo(f"[{render.stats_line(run.completion.stats)}]\n", err=True)
        if run.interrupted:
            raise KeyboardInterrupt
        found[mode] = run.completion
    return found


def _stand_in(size: str, target: Path) -> dict[str, Any]:
    from ggufspec.standin import padded

    n_params = padded.parse_size(size)
    dimensions = padded.plan_dimensions(n_params)
    return {
        "path": str(target),
        "n_bytes": target.stat().st_size,
        "n_params": padded.padded_file(n_params).n_params,
        "n_embd": dimensions.n_embd,
        "n_layer": dimensions.n_layers,
        "n_head": dimensions.n_heads,
        "n_ff": dimensions.n_ff,
    }


def _row(mode: str, runs: Sequence[Stats]) -> dict[str, Any]:
    """A row of the table: medians over texts, and the share of time outside llama_decode."""
    rates = [stats.tokens_per_second for stats in runs]
    n_drafted = sum(stats.n_drafted for stats in runs)
    n_rounds = sum(stats.n_rounds for stats in runs)
    return {
        "mode": mode,
        "n_runs": len(runs),
        "tokens_per_second": median(rates),
        "tokens_per_second_spread": [min(rates), max(rates)],
        "accepted": sum(stats.n_accepted for stats in runs) / n_drafted if n_drafted else None,
        "mean_length": sum(stats.n_generated for stats in runs) / max(n_rounds, 1),
        "overhead": median(stats.overhead for stats in runs),
    }


def _print_result(document: dict[str, Any]) -> None:
    plain, speculative = document["rows"]
    low, high = document["speedup_spread"]
    speedup = f"{document['speedup']:.2f} ({low:.2f} to {high:.2f})"
    accepted, length = f"{speculative['accepted'] or 0:.1%}", f"{speculative['mean_length']:.2f}"
    rows = [
        ["plain", f"{plain['tokens_per_second']:.1f}", "1.00", "", "1.00"],
        ["speculative", f"{speculative['tokens_per_second']:.1f}", speedup, accepted, length],
    ]
    render.echo_table(["", "tokens/s", "speed-up", "accepted", "tokens/round"], rows)
    temperature, n_texts = document["settings"]["temperature"], document["n_texts"]
    render.echo(
        f"Medians of {counted(n_texts, 'text')} at temperature {temperature:g}. The large model is "
        f"a stand-in with the cost of {document['stand_in']['n_params'] / 1e6:,.0f} M parameters."
    )
