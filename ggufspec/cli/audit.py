"""`ggufspec audit`: tests whether a pair's speculative text has the target's distribution."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import DIFFERENCE, render, shared
from ggufspec.cli.loading import PairOptions, late_bars, load_with_bars, room_for_drafts
from ggufspec.cli.options import added, gathered, groups, load_options, options
from ggufspec.cli.text_settings import conditions, to_generate, with_file_sampling
from ggufspec.common.prompts import TEXTS, read_prompts

if TYPE_CHECKING:
    from ggufspec.bench.audit import AuditReport
    from ggufspec.bench.audit.report import Sequences


@click.command(name="audit", cls=shared.SectionedCommand)
@shared.pair_options("target", "draft", "offline", draft={"required": True})
@gathered(
    "audited",
    *options("audited"),
    *options("drafting", "tree", "verify"),
    *options("text", "seed"),
)
@gathered(
    "sampling",
    *options("text", "temperature"),
    *options("drafting", "draft_temperature"),
    *groups("sampling", "constraints"),
    make=to_generate,
)
@load_options()
@added(*options("audit"), *options("output", "as_json", "verbose"))
def command(
    pair: PairOptions,
    prompt_file: Path | None,
    audited: dict[str, Any],
    sampling: dict[str, Any],
    load_settings: dict[str, Any],
    as_json: bool,
    verbose: bool,
) -> int:
    """Test whether speculative text is what the target alone would write.

    Computes next-token distributions exactly, compares sampled texts by two-sample tests, and
    greedy texts token by token. Exit code 0: no difference was found; 1: a difference was found.

    \b
      ggufspec audit --target large.gguf --draft small.gguf
      ggufspec audit --target large.gguf --draft small.gguf --temp 0 --prompts mine.txt
    """
    prompts = None
    if prompt_file is not None:
        found = read_prompts(prompt_file, TEXTS)
        prompts = [prompt.turns[0] for prompt in found]
    from ggufspec.bench.audit import PROMPTS, AuditOptions, audit

    settings = AuditOptions(**audited, options=sampling)  # type: ignore[arg-type]
    load_settings |= room_for_drafts(settings.n_draft)
    paths = pair.find()
    with load_with_bars(*paths, load_settings) as engine, late_bars() as bars:
        own = with_file_sampling(settings.options, engine.file_sampling, verbose=verbose)
        settings = replace(settings, options=own)  # type: ignore[arg-type]
        report = audit(engine, prompts or PROMPTS, settings, progress=bars.update)
    if as_json:
        document = asdict(report)
        document["verdict"] = report.verdict
        document["differences"] = list(report.differences)
        used = document["settings"]
        used |= {**used.pop("options"), "prompts": prompt_file and str(prompt_file)}
        document |= conditions(paths, {**used, **load_settings})
        render.echo_json(document)
    else:
        _print_report(report)
    return DIFFERENCE if report.differences else 0


def _print_report(report: AuditReport) -> None:
    if (batch := report.batch) is not None and (rule := report.rule) is not None:
        rows = []
        for name, of in (
            ("target: batches vs. single tokens", batch),
            (f"rule {report.settings.verify} vs. target", rule),
        ):
            found = [f"{each:.1g}" for each in (of.median, of.largest, of.resolution)]
            rows.append([name, *found[:2], str(of.n_positions), found[2]])
        header = ["Next-token distributions", "median", "largest", "positions", "resolution"]
        render.echo_table(header, rows)
        render.echo(
            "Distances are total variation: 0 for equal distributions, 1 for disjoint ones.\n"
            "Resolution is the distance due to numerical error; for batches: median rounding.\n"
        )
    if report.sequences is not None:
        _print_sequences(report.sequences, report.settings.seed)
    greedy = report.greedy
    n_same = greedy.n_texts - len(greedy.divergences)
    line = f"Temperature 0: {n_same} of {greedy.n_texts} texts are identical"
    if greedy.divergences:
        where = ", ".join(
            f"prompt {each.prompt + 1} at token {each.position + 1} (logit gap {each.gap:.2g})"
            for each in greedy.divergences
        )
        line += f"; the others diverge: {where}"
        if greedy.near_tie is not None:
            line += f". A gap of up to {greedy.near_tie:.2g} is a near-tie"
    render.echo(f"{line}.\n\n{report.verdict}")


def _print_sequences(found: Sequences, seed: int | None) -> None:
    interval = f"{100 * (1 - found.alpha):.4g} % interval"
    rows = []
    for test in found.tests:
        between = "" if test.low is None else f"{test.low:.3f} to {test.high:.3f}"
        rows.append([test.name, f"{test.effect:.3f}", between, f"{test.p_holm:.2g}"])
    header = ["Sampled texts, speculative - plain", "effect", interval, "p (Holm)"]
    render.echo_table(header, rows)
    share = found.n_accepted / found.n_drafted if found.n_drafted else 0.0
    render.echo(
        f"{found.n_texts} texts of each kind, {found.n_tokens_plain:,} and "
        f"{found.n_tokens_speculative:,} tokens; {share:.0%} of {found.n_drafted:,} drafted tokens "
        f"accepted; seed {seed}.\n"
        f"p is the probability of such an effect by chance; if p <= {found.alpha:g} (--alpha), it "
        "counts as a difference."
    )
    if n_impossible := sum(found.n_impossible):
        is_one = n_impossible == 1
        render.echo(
            f"{n_impossible} token{' has' if is_one else 's have'} probability 0 in batched "
            "evaluation; a few are expected near the top-k/top-p cut-off."
        )
    render.echo()
