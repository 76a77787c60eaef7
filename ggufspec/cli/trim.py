"""`ggufspec trim`: writes a cheaper draft, and prints costs and gains of each cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import ERROR, load_options, render, shared
from ggufspec.cli.loading import find_model, late_bars, load_with_bars
from ggufspec.cli.parameters import PATH, gathered, only, option
from ggufspec.common.files import format_bytes
from ggufspec.common.reading import read_text
from ggufspec.models.trim_facts import numbers_of, ranges

if TYPE_CHECKING:
    from ggufspec.bench.trim import CutResult, TrimResult


def _amount(value: str, *, lists: bool) -> tuple[int, ...] | int | str | None:
    """A number, "auto", None for "all", or a list such as 0-10,14-23. Raises BadParameter."""
    if value in ("all", "auto"):
        return None if value == "all" else value
    if re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    if lists and (found := numbers_of(value)):
        return found
    wanted = "a number, a list such as 0-10,14-23" if lists else "a number"
    raise click.BadParameter(f"{value!r} is neither {wanted}, auto nor all")


@click.command(name="trim", cls=shared.SectionedCommand)
@click.argument("draft", metavar="MODEL")
@option(
    "-o --output",
    "The file to write; without it, only the table is printed.",
    type=PATH,
    metavar="FILE",
)
@option(
    "-m --target",
    "The target that the draft is for: what to keep is measured with it.  [default: MODEL itself]",
    metavar="MODEL",
)
@shared.offline_option
@option("-f --force", "Replace an existing file.", is_flag=True)
@option(
    "--vocab",
    "Number of tokens to keep; auto: the number with the best predicted speed-up; all.",
    callback=lambda context, option, value: _amount(value, lists=False),
    metavar="N|auto|all",
    default="auto",
)
@option(
    "--layers",
    "Layers to keep: their number, a list such as 0-10,14-23, auto (layers that gain more than "
    "they cost; takes about a minute), or all.",
    callback=lambda context, option, value: _amount(value, lists=True),
    metavar="N|LIST|auto|all",
    default="all",
)
@option(
    "--type type_",
    "Quantize the matrices again, such as q4_0; auto: q4_0 if that is predicted to be faster.",
    metavar="TYPE",
)
@option(
    "--text texts",
    "A file with text similar to the target's future texts; may be given several times.  "
    "[default: text that the target generates]",
    type=PATH,
    metavar="FILE",
    multiple=True,
)
@gathered(
    "placed",
    *only(load_options.LOAD, "n_threads", "n_threads_draft", "n_gpu_layers", "n_gpu_layers_draft"),
)
@shared.json_option
@shared.log_option
def command(
    draft: str,
    output: Path | None,
    target: str | None,
    offline: bool,
    force: bool,
    vocab: int | str | None,
    layers: tuple[int, ...] | int | str | None,
    type_: str | None,
    texts: Sequence[Path],
    placed: dict[str, Any],
    as_json: bool,
) -> int:
    """Make a cheaper draft out of a model: fewer tokens, fewer layers, smaller types.

    Needs no training: weights are left out. Costs and gains of each cut are measured on text of
    your target. The draft proposes only tokens that it has kept; the text keeps the target's
    distribution. A model can also become a draft for itself, with a part of its layers.

    \b
      ggufspec trim small.gguf --target large.gguf -o draft.gguf
      ggufspec trim small.gguf --target large.gguf --vocab 32768 --layers auto -o draft.gguf
      ggufspec trim large.gguf --layers auto -o draft.gguf
    """
    from ggufspec.bench import reference, trim
    from ggufspec.models.gguf_file import check_path
    from ggufspec.models.header import read_header

    wanted = trim.WantedCut(vocab, layers, type_)
    if wanted == trim.WantedCut(None):
        raise click.UsageError("nothing would be cut; choose with --vocab, --layers or --type")
    draft_path = find_model(draft, offline=offline)
    target_path = draft_path if target is None else find_model(target, offline=offline)
    source = read_header(draft_path)
    if output is not None:
        check_path(output, force=force, sources=[*source.paths, target_path])
    trim.check_wanted(wanted, source, read_header(target_path))
    given = [read_text(path, "the text file") for path in texts]
    own = {name: placed[name] for name in ("n_threads", "n_gpu_layers")}
    of_target = {**reference.LOAD, **own}
    of_draft = {
        "n_ctx": reference.N_CTX,
        "mmap": False,
        "n_threads": placed["n_threads_draft"] or placed["n_threads"],
        "n_gpu_layers": placed["n_gpu_layers_draft"],
    }
    with load_with_bars(target_path, None, of_target) as engine, late_bars() as bars:
        found = reference.reference_of(engine, given, bars.update)
    with load_with_bars(draft_path, None, of_draft) as engine, late_bars() as bars:
        result = trim.trim(engine, source, found, wanted, output, force=force, progress=bars.update)
    if as_json:
        paths = {"draft": str(draft_path), "target": str(target_path)}
        document = {
            "cuts": [{**asdict(cut), "score": cut.score} for cut in result.cuts],
            "chosen": result.cuts.index(result.chosen),
            "n_counted": result.n_counted,
            "output": str(output) if output and result.is_cut else None,
            "settings": {**paths, **asdict(wanted), "text": list(map(str, texts)), **of_target},
            "versions": render.versions(),
        }
        render.echo_json(document)
    else:
        _print_report(result)
    if result.chosen.score < 1:
        render.note("this draft is predicted to be slower than plain decoding, on average")
    if not result.is_cut:
        render.note("no cut is predicted to be faster than the draft as it is; nothing was written")
        return ERROR if output is not None else 0
    if output is not None:
        render.note(
            f"wrote {format_bytes(output.stat().st_size)}; use it with "
            f"`ggufspec run --target {target_path} --draft {output}`"
        )
    return 0


def _print_report(result: TrimResult) -> None:
    kinds, n_layers = list(result.chosen.agreement), len(result.cuts[0].cut.layers)
    header = ["keeps", "step reads", "ms/step"]
    header += [f"{kind}: {each}" for kind in kinds for each in ("agrees", "overlap", "speed-up")]
    rows = []
    for cut in result.cuts:
        row = [_kept(cut, n_layers), format_bytes(cut.n_bytes), f"{1000 * cut.step:.2f}"]
        for kind in kinds:
            row += [f"{cut.agreement[kind]:.1%}", f"{cut.overlap[kind]:.1%}"]
            row.append(" / ".join(f"{each:.2f}" for each in cut.speedups[kind]))
        rows.append([*row, "chosen" if cut is result.chosen else ""])
    render.echo_table([*header, ""], rows)
    render.echo(
        f"Over {result.n_counted:,} tokens of text. agrees: target and draft have the same most "
        "probable token. overlap: the\nacceptance rate of a drafted token at temperature 0.7. "
        "speed-up: predicted over plain decoding, at temperature 0 / 0.7."
    )


def _kept(result: CutResult, n_layers: int) -> str:
    cut = result.cut
    parts = [f"{result.n_tokens:,} tokens"] if cut.n_tokens else []
    if len(cut.layers) < n_layers:
        parts.append(f"layers {ranges(cut.layers)}")
    return ", ".join([*parts, *([cut.type] if cut.type else [])]) or "all"
