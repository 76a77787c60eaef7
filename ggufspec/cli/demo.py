"""`ggufspec demo`: plain and speculative decoding of the embedded pair; nothing to download."""

from __future__ import annotations

import sys
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
from ggufspec.cli.run import generate
from ggufspec.cli.sections import SectionedCommand
from ggufspec.cli.text_settings import checked
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.generation import Completion

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
@option("-t --threads n_threads", "Threads for the target.", type=AT_LEAST_1)
@shared.cache_dir_option
@shared.color_option
@shared.verbose_option
def command(
    size: str,
    settings: dict[str, Any],
    n_threads: int | None,
    cache_dir: Path | None,
    color: str,
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
    writer = render.TextWriter(color=render.wants_color(color, sys.stdout))
    with load(target, draft, n_threads=n_threads, **shared.room_for(settings["n_draft"])) as engine:
        demo = _Demo(engine, settings, writer)
        interrupted = not demo.run()
    if demo.pairs:
        _print_result(demo, size)
    return INTERRUPTED if interrupted else 0


@dataclass
class _Demo:
    """Generates the texts of both modes, and keeps what was measured."""

    engine: Engine
    settings: dict[str, Any]
    writer: render.TextWriter
    pairs: list[tuple[Stats, Stats]] = field(default_factory=list)  # plain, speculative
    same_text: bool | None = None  # at temperature 0

    def run(self) -> bool:
        """All texts, in both modes alternately; False if the user interrupted it."""
        if self._both(PROMPTS[0], {"max_tokens": WARM_UP_TOKENS}, shown=False) is None:
            return False
        for prompt in PROMPTS:
            if (both := self._both(prompt, {})) is None:
                return False
            self.pairs.append((both[0].stats, both[1].stats))
        if (both := self._both(GREEDY_PROMPT, {"temperature": 0.0}, " at temperature 0")) is None:
            return False
        self.same_text = both[0].tokens == both[1].tokens
        return True

    def _both(
        self, prompt: str, changed: dict[str, Any], label: str = "", *, shown: bool = True
    ) -> list[Completion] | None:
        """The prompt continued in both modes; None if the user interrupted it."""
        completions = []
        for mode, drafter in _DRAFTERS.items():
            if shown:
                self.writer.heading(f"{mode}{label}: ", prompt)
            options = checked({**self.settings, **changed, "drafter": drafter})
            run = generate(self.engine, prompt, options, self.writer if shown else None)
            if shown:
                click.echo(f"[{render.stats_line(run.completion.stats)}]\n", err=True)
            if run.interrupted:
                return None
            completions.append(run.completion)
        return completions


def _print_result(demo: _Demo, size: str) -> None:
    from ggufspec.standin import padded

    plain, speculative = zip(*demo.pairs, strict=True)
    rates = [median(each.tokens_per_second for each in stats) for stats in (plain, speculative)]
    ratios = [
        fast.tokens_per_second / slow.tokens_per_second
        for slow, fast in demo.pairs
        if slow.tokens_per_second > 0
    ]
    n_drafted = sum(stats.n_drafted for stats in speculative)
    accepted = sum(stats.n_accepted for stats in speculative) / max(n_drafted, 1)
    n_rounds = sum(stats.n_rounds for stats in speculative)
    mean_length = sum(stats.n_generated for stats in speculative) / max(n_rounds, 1)
    faster = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    render.echo_table(
        ["", "tokens/s", "speed-up", "accepted", "tokens/round"],
        [
            ["plain", f"{rates[0]:.1f}", "1.00", "", "1.00"],
            ["speculative", f"{rates[1]:.1f}", faster, f"{accepted:.1%}", f"{mean_length:.2f}"],
        ],
    )
    n_params = padded.padded_file(padded.parse_size(size)).n_params
    click.echo(
        f"Medians of {len(demo.pairs)} texts at temperature {demo.settings['temperature']:g}. The "
        f"large model is a stand-in with the cost of {n_params / 1e6:,.0f} M parameters."
    )
    if demo.same_text:
        click.echo("At temperature 0, both wrote the same text.")
    elif demo.same_text is not None:
        click.echo(
            "At temperature 0, the texts differ: batches of different sizes round differently, "
            "and two tokens were almost equally likely."
        )
