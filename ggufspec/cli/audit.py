"""`ggufspec audit`: is speculative text what the target alone would write? Asks a user's pair."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import render
from ggufspec.cli.exits import DIFFERENCE
from ggufspec.cli.files import read_prompt_file
from ggufspec.cli.names import find_models, offline_option
from ggufspec.cli.options import (
    audited_draft_n_option,
    draft_option,
    draft_temperature_option,
    load_options,
    room_for,
    seed_option,
    show_log,
    target_option,
    verbose_option,
    verify_option,
)
from ggufspec.cli.progress import late_bars, load_with_bars
from ggufspec.cli.sampling_options import sampling_options, to_generate, to_json
from ggufspec.cli.sections import SectionedCommand
from ggufspec.common import defaults

if TYPE_CHECKING:
    from ggufspec.audit import AuditReport


@click.command(name="audit", cls=SectionedCommand)
@target_option()
@draft_option(required=True)
@offline_option
@audited_draft_n_option
@verify_option
@draft_temperature_option
@click.option(
    "--prompts",
    "prompt_file",
    type=click.Path(path_type=Path),
    help='Prompts: JSON lines with "prompt" or "turns", or plain text, one a paragraph (where '
    "there are empty lines) or a line. [default: eight of our own]",
)
@click.option(
    "--runs",
    "n_runs",
    type=click.IntRange(min=1),
    default=defaults.AUDIT_RUNS,
    show_default=True,
    help="Texts to write in each way; the prompts take turns.",
)
@click.option(
    "-n",
    "--n-predict",
    "n_tokens",
    type=click.IntRange(min=2),
    default=defaults.AUDIT_TOKENS,
    show_default=True,
    help="Tokens of a text at most.",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
    default=defaults.AUDIT_ALPHA,
    show_default=True,
    help="Chance of a false alarm, of the whole audit.",
)
@click.option(
    "--near-tie",
    type=click.FloatRange(min=0),
    default=defaults.AUDIT_NEAR_TIE,
    show_default=True,
    help="Logits this close may change places at temperature 0.",
)
@sampling_options
@seed_option
@load_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")
@verbose_option
def command(
    target: str,
    draft: str,
    offline: bool,
    n_draft: int | str,
    verify: str,
    draft_temperature: float | str,
    prompt_file: Path | None,
    n_runs: int,
    n_tokens: int,
    alpha: float,
    near_tie: float,
    sampling: dict[str, Any],
    seed: int | None,
    load_settings: dict[str, Any],
    as_json: bool,
    verbose: bool,
) -> int:
    """Test whether speculative text is what the target alone would write.

    Compares the laws of the next token exactly, sampled texts by two-sample tests, and greedy texts
    token by token. Exit code 0: no difference was found; 1: one was.

    \b
      ggufspec audit --target large.gguf --draft small.gguf
      ggufspec audit --target large.gguf --draft small.gguf --temp 0 --prompts mine.txt
    """
    prompts = _read_prompts(prompt_file)
    show_log(verbose)
    from ggufspec.audit import PROMPTS, AuditOptions, audit

    settings = AuditOptions(
        n_runs=n_runs,
        n_tokens=n_tokens,
        alpha=alpha,
        near_tie=near_tie,
        seed=seed,
        n_draft=n_draft,
        verify=verify,
        options={**to_generate(sampling), "draft_temperature": draft_temperature},  # type: ignore[typeddict-item]
    )
    load_settings.update(room_for(n_draft))
    target_path, draft_path = find_models(target, draft, offline=offline)
    engine = load_with_bars(target_path, draft_path, load_settings)
    with engine, late_bars() as bars:
        report = audit(engine, prompts or PROMPTS, settings, progress=bars.update)
    if as_json:
        document = asdict(report)
        document["verdict"] = report.verdict
        document["differences"] = list(report.differences)
        options = document["settings"].pop("options")
        document["settings"].update(to_json(options))
        document["settings"].update(
            {
                "target": str(target_path),
                "draft": str(draft_path),
                "prompts": None if prompt_file is None else str(prompt_file),
                **load_settings,
            }
        )
        document["versions"] = render.versions()
        render.echo_json(document)
    else:
        _print_report(report)
    return DIFFERENCE if report.differences else 0


def _read_prompts(path: Path | None) -> list[str] | None:
    """The prompts of a file; None where there is no file. Raises PromptError."""
    if path is None:
        return None
    from ggufspec.common.prompts import TEXTS, parse_prompts

    prompts = parse_prompts(read_prompt_file(path), str(path), TEXTS)
    return [prompt.turns[0] for prompt in prompts]


def _print_report(report: AuditReport) -> None:
    rows: list[list[str]] = []
    if report.batch is not None:
        batch = report.batch
        distances = [f"{batch.median:.1g}", f"{batch.largest:.1g}"]
        rows.append(["target: batches vs. single tokens", *distances, str(batch.n_positions), ""])
    if report.rule is not None:
        rule = report.rule
        distances = [f"{rule.median:.1g}", f"{rule.largest:.1g}"]
        name = f"rule {report.settings.verify} vs. target"
        rows.append([name, *distances, str(rule.n_positions), f"{rule.resolution:.1g}"])
    if rows:
        render.echo_table(
            ["Next-token distributions", "median", "largest", "positions", "resolution"], rows
        )
        click.echo(
            "Distances are total variation: 0 for equal distributions, 1 for disjoint ones.\n"
            "Rounding makes small ones; resolution is their numerical error.\n"
        )
    if report.sequences is not None:
        _print_sequences(report)
    greedy = report.greedy
    n_same = greedy.n_texts - len(greedy.divergences)
    line = f"Temperature 0: {n_same} of {greedy.n_texts} texts are identical"
    if greedy.divergences:
        where = ", ".join(
            f"prompt {each.prompt + 1} at token {each.position + 1} (logit gap {each.gap:.2g})"
            for each in greedy.divergences
        )
        line += f"; the others diverge: {where}. A gap of up to {greedy.near_tie:g} is a near-tie"
    click.echo(f"{line}.\n\n{report.verdict}")


def _print_sequences(report: AuditReport) -> None:
    found = report.sequences
    assert found is not None
    interval = f"{100 * (1 - found.alpha):.4g} % interval"
    render.echo_table(
        ["Sampled texts, speculative - plain", "effect", interval, "p (Holm)"],
        [
            [
                test.name,
                f"{test.effect:.3f}",
                "" if test.low is None else f"{test.low:.3f} to {test.high:.3f}",
                f"{test.p_holm:.2g}",
            ]
            for test in found.tests
        ],
    )
    share = found.n_accepted / found.n_drafted if found.n_drafted else 0.0
    click.echo(
        f"{found.n_texts} texts of each kind, {found.n_tokens_plain:,} and "
        f"{found.n_tokens_speculative:,} tokens; {share:.0%} of {found.n_drafted:,} drafted tokens "
        f"accepted; seed {report.settings.seed}.\n"
        f"p is the probability of such an effect by chance; if p <= {found.alpha:g} (--alpha), it "
        "counts as a difference."
    )
    n_impossible = sum(found.n_impossible)
    if n_impossible:
        is_one = n_impossible == 1
        click.echo(
            f"{n_impossible} token{' has' if is_one else 's have'} probability 0 in batched "
            "evaluation; a few are expected near the top-k/top-p cut-off."
        )
    click.echo()
