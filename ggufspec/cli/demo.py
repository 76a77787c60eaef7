"""`ggufspec demo`: plain and speculative decoding of the embedded pair; nothing to download."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import click

from ggufspec.cli import options as shared
from ggufspec.cli import render
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.names import PairOptions
from ggufspec.cli.options import AT_LEAST_1, COUNT, NOT_NEGATIVE, gathered, option
from ggufspec.cli.run import Run, generate
from ggufspec.cli.sections import SectionedCommand
from ggufspec.cli.text_settings import checked
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.engine import Engine

PROMPTS: Final = (
    "Up betimes, and by water to Whitehall,",
    '"My dear Watson," said Holmes,',
    "A fox and a wolf once lived together in the forest, and",
    "It was past midnight when the old gentleman",
)
GREEDY_PROMPT: Final = PROMPTS[0]
WARM_UP_TOKENS: Final = 16
_DRAFTERS: Final = {"plain": "none", "speculative": None}  # of the two modes
# A model this small repeats itself, or loses its thread; both read better with these.
_SAMPLING: Final = {"min_p": 0.1, "repeat_penalty": 1.15}


@click.command(name="demo", cls=SectionedCommand)
@shared.size_option
@gathered(
    "settings",
    shared.draft_n_option,
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
        default=defaults.TEMPERATURE,
    ),
    option("-s --seed", "Seed.", type=COUNT, default=0),
)
@option("--runs", "Texts for each prompt and mode.", type=click.IntRange(1, 100), default=1)
@option("-t --threads n_threads", "Threads for the target.", type=AT_LEAST_1)
@shared.cache_dir_option
@shared.color_option
@shared.json_option
@shared.verbose_option
def command(
    size: str,
    settings: dict[str, Any],
    runs: int,
    n_threads: int | None,
    cache_dir: Path | None,
    color: str,
    as_json: bool,
    verbose: bool,
) -> int:
    """Watch a large model generate faster with a small draft model, without a download.

    The large model is a stand-in: a 7 M-parameter model of old novels, padded with zeros to the
    cost of --size parameters; it writes no better. It continues four prompts with and without its
    1.5 M draft, and one of them at temperature 0, where both ways write the same text.
    """
    from ggufspec.engine.load import load

    shared.show_log(verbose)
    target, draft = PairOptions(None, None, True, size, cache_dir).find()
    settings |= {**_SAMPLING, "ignore_eos": True}
    writer = None if as_json else render.TextWriter(color=render.wants_color(color, sys.stdout))
    with load(target, draft, n_threads=n_threads, **shared.room_for(settings["n_draft"])) as engine:
        demo = _Demo(engine, settings, writer)
        interrupted = not demo.run(runs)
    if demo.pairs:
        document = {
            **demo.document(),
            "stand_in": _stand_in(size, target),
            "settings": {**settings, "runs": runs},
            "versions": render.versions(),
        }
        if as_json:
            render.echo_json(document)
        else:
            _print_result(document)
    return INTERRUPTED if interrupted else 0


@dataclass
class _Demo:
    """Generates the texts of both modes, and keeps what was measured."""

    engine: Engine
    settings: dict[str, Any]
    writer: render.TextWriter | None
    pairs: list[tuple[Stats, Stats]] = field(default_factory=list)  # plain, speculative
    greedy: dict[str, Any] | None = None

    def run(self, n_runs: int) -> bool:
        """All texts, in both modes alternately; False if the user interrupted it."""
        if self._both(PROMPTS[0], {"max_tokens": WARM_UP_TOKENS}, shown=False) is None:
            return False
        for run in range(n_runs):
            for prompt in PROMPTS:
                both = self._both(prompt, {"seed": self.settings["seed"] + run})
                if both is None:
                    return False
                self.pairs.append((both[0].completion.stats, both[1].completion.stats))
        both = self._both(GREEDY_PROMPT, {"temperature": 0.0}, " at temperature 0")
        if both is not None:
            plain, speculative = (run.completion for run in both)
            same = plain.tokens == speculative.tokens
            self.greedy = {"prompt": GREEDY_PROMPT, "text": plain.text, "same_text": same}
        return both is not None

    def document(self) -> dict[str, Any]:
        plain, speculative = zip(*self.pairs, strict=True)
        ratios = [
            fast.tokens_per_second / slow.tokens_per_second
            for slow, fast in self.pairs
            if slow.tokens_per_second > 0
        ]
        return {
            "rows": [_row("plain", plain), _row("speculative", speculative)],
            "speedup": median(ratios),
            "speedup_spread": [min(ratios), max(ratios)],
            "n_texts": len(self.pairs),
            "greedy": self.greedy,
        }

    def _both(
        self, prompt: str, changed: dict[str, Any], label: str = "", *, shown: bool = True
    ) -> list[Run] | None:
        """The prompt continued in both modes; None if the user interrupted it."""
        writer = self.writer if shown else None
        runs: list[Run] = []
        for mode, drafter in _DRAFTERS.items():
            if writer is not None:
                writer.heading(f"{mode}{label}: ", prompt)
            options = checked({**self.settings, **changed, "drafter": drafter})
            runs.append(generate(self.engine, prompt, options, writer))
            if writer is not None:
                render.echo(f"[{render.stats_line(runs[-1].completion.stats)}]\n", err=True)
            if runs[-1].interrupted:
                return None
        return runs


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
        ["", "tokens/s", "speed-up", "accepted", "tokens/round"],
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
    temperature, n_texts = document["settings"]["temperature"], document["n_texts"]
    render.echo(
        f"Medians of {n_texts} texts at temperature {temperature:g}. The large model is a stand-in "
        f"with the cost of {document['stand_in']['n_params'] / 1e6:,.0f} M parameters."
    )
    if document["greedy"] is not None and document["greedy"]["same_text"]:
        render.echo("At temperature 0, both wrote the same text.")
    elif document["greedy"] is not None:
        render.echo(
            "At temperature 0, the texts differ: batches of different sizes round differently, "
            "and two tokens were almost equally likely."
        )
