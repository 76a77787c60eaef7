"""How results look: text with its authors coloured, the line of statistics, tables, JSON.

Only formats; measures and decides nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.decoding.types import Round
    from ggufspec.engine.generation import Chunk

COLOR_CHOICES = ("auto", "on", "off")
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = "__..::##"
_PLOT_HEIGHT = 8  # lines
_WIDEST_COLUMN = 5
_PACKAGES = ("ggufspec", "llama-cpp-python", "numpy")


def wants_color(choice: str, stream: IO[str]) -> bool:
    """Whether to colour: "auto" means on a terminal that can, unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "on"
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class TextWriter:
    """Writes chunks to stdout as they come; what the draft wrote is green where colour is on."""

    def __init__(self, *, color: bool) -> None:
        self._color = color
        tolerate_letters()

    def write(self, chunk: Chunk) -> None:
        text = chunk.text
        if self._color and text and chunk.drafted and chunk.drafted[0]:
            text = f"{_GREEN}{text}{_PLAIN}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def heading(self, label: str, prompt: str) -> None:
        """What comes before a text: a label, and the prompt that it continues."""
        bold = "\x1b[1m" if self._color else ""
        sys.stdout.write(f"{bold}{label}{_PLAIN if bold else ''}{prompt}")
        sys.stdout.flush()

    def finish(self) -> None:
        """End the last line."""
        sys.stdout.write("\n")
        sys.stdout.flush()


def stats_line(stats: Stats, speedup: float | None = None) -> str:
    """One line for stderr."""
    parts = [f"{stats.n_generated} tokens at {stats.tokens_per_second:.1f} tokens/s"]
    if speedup is not None:
        parts.append(f"{speedup:.2f} times as fast as without a draft")
    if stats.n_drafted:
        parts.append(
            f"drafted {stats.n_drafted}, accepted {stats.n_accepted} ({stats.acceptance:.1%}), "
            f"{stats.mean_length:.2f} tokens a round"
        )
    if 0 < stats.n_rounds_without_draft < stats.n_rounds:
        share = stats.n_rounds_without_draft / stats.n_rounds
        parts.append(f"{share:.0%} of rounds without a draft")
    parts.append(f"prompt {stats.n_prompt} tokens in {stats.seconds.prompt:.2f} s")
    return "; ".join(parts)


def rounds_text(rounds: Sequence[Round]) -> str:
    """A line for each round: what was drafted, what was expected, what came, and why no more."""
    lines = []
    for i, turn in enumerate(rounds):
        expected = "" if turn.expected is None else f" ({turn.expected:.1f} expected)"
        why = f"; {turn.why}" if turn.why else ""
        lines.append(
            f"round {i + 1}: drafted {turn.n_drafted}, accepted {turn.n_accepted}{expected}, "
            f"{1e3 * turn.draft_seconds:.1f} + {1e3 * turn.target_seconds:.1f} ms{why}"
        )
    return "\n".join(lines)


def details_text(stats: Stats) -> str:
    """Where the time went, and how far drafts stood: for those who want to know why."""
    seconds, generation = stats.seconds, stats.seconds.generation or 1.0
    parts = {
        "draft": seconds.draft,
        "target": seconds.target,
        "verify": seconds.verify,
        "other": seconds.other,
    }
    shares = ", ".join(f"{name} {part / generation:.1%}" for name, part in parts.items())
    lines = [f"time: {shares}"]
    if stats.n_drafted:
        positions = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
        accepted = " ".join(f"{a / d:.0%}" if d else "-" for a, d in positions)
        lines.append(f"accepted by position: {accepted}")
    if stats.n_expected is not None and stats.n_drafted:
        lines.append(f"expected to stand: {stats.n_expected:.1f} tokens; stood: {stats.n_accepted}")
    return "\n".join(lines)


def stats_json(stats: Stats) -> dict[str, Any]:
    """The statistics of a generation, as documents have them."""
    seconds = stats.seconds
    return {
        "n_prompt": stats.n_prompt,
        "n_generated": stats.n_generated,
        "n_rounds": stats.n_rounds,
        "n_drafted": stats.n_drafted,
        "n_accepted": stats.n_accepted,
        "n_expected": stats.n_expected,
        "n_rounds_without_draft": stats.n_rounds_without_draft,
        "acceptance": stats.acceptance,
        "mean_length": stats.mean_length,
        "drafted_by_position": list(stats.drafted_by_position),
        "accepted_by_position": list(stats.accepted_by_position),
        "seconds": {
            "prompt": seconds.prompt,
            "draft": seconds.draft,
            "target": seconds.target,
            "verify": seconds.verify,
            "other": seconds.other,
            "decode": seconds.decode,
        },
        "overhead": stats.overhead,
        "tokens_per_second": stats.tokens_per_second,
        "notes": dict(stats.notes),
    }


def echo_table(header: list[str], rows: list[list[str]]) -> None:
    """A small table on stdout; numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(
            name,
            justify="left" if i == 0 else "right",
            no_wrap=True,
            overflow="ellipsis" if can_write("…") else "crop",
        )
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, highlight=False).print(table)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """An aligned table, numbers to the right, no cell cut off; a line wider than `width` is split.

    Where it is too wide, columns that do not fit go below, with the first one again.
    """
    widths = column_widths([list(columns), *map(list, rows)])
    lines: list[str] = []
    start = 1
    while start < len(columns) or not lines:
        room, end = width - widths[0], start
        while end < len(columns) and (end == start or room >= widths[end] + 2):
            room -= widths[end] + 2
            end += 1
        shown = [0, *range(start, end)]
        lines += [""] if lines else []
        for row in (columns, *rows):
            cells = [f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in shown[1:])]
            lines.append("  ".join(cells).rstrip())
        start = end
    return lines


def echo_rows(rows: list[list[str]]) -> None:
    """Columns, nothing cut off, however narrow the terminal is."""
    widths = column_widths(rows)
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def column_widths(rows: list[list[str]]) -> list[int]:
    """Of rows that echo_rows prints, with two blanks between the columns."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def width_of_stdout() -> int:
    """Characters of a line: of the terminal, or as many as there are where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def columns(values: Sequence[float], names: Sequence[str], *, width: int, plain: bool) -> list[str]:
    """Lines of a plot: a column for each value over its name, no wider than `width`.

    `plain`: of ASCII alone. Where there is no room, names are left out, and then columns.
    """
    top = max(values, default=0.0)
    if not top > 0:
        return []
    labels = [_number(top), _number(top / 2), "0"]
    margin = max(map(len, labels))
    room = width - margin - 1
    step = -(-len(values) // max(room, 1))  # of more values than there is room for, each so many-th
    shown, named = list(values)[::step], list(names)[::step]
    each = max(min(room // len(shown), _WIDEST_COLUMN), 1)
    eighths = [round(value / top * _PLOT_HEIGHT * 8) for value in shown]
    steps = _PLAIN_BLOCKS if plain else _BLOCKS
    lines = []
    for row in range(_PLOT_HEIGHT - 1, -1, -1):
        label = {_PLOT_HEIGHT - 1: labels[0], _PLOT_HEIGHT // 2 - 1: labels[1]}.get(row, "")
        cells = (min(max(height - 8 * row, 0), 8) for height in eighths)
        bar = max(each - 1, 1)
        body = "".join((steps[n - 1] if n else " ") * bar + " " * (each - bar) for n in cells)
        lines.append(f"{label:>{margin}} {body}".rstrip())
    every = -(-(max(map(len, named)) + 1) // each)
    under = ""
    for i, name in enumerate(named):
        if i % every == 0 and i * each + len(name) <= room:
            under = f"{under:<{i * each}}{name}"
    return [*lines, f"{'':>{margin}} {under}"]


def echo_columns(values: Sequence[float], names: Sequence[str]) -> None:
    """The same on stdout, as wide as the terminal, of characters that it has."""
    width = shutil.get_terminal_size().columns
    for line in columns(values, names, width=width, plain=not can_write(_BLOCKS)):
        click.echo(line)


def tolerate_letters() -> None:
    """Replace what stdout lacks: a terminal without some letter ends no generation."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="replace")


def can_write(text: str) -> bool:
    """Whether stdout has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def echo_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False).encode("utf-8", "replace"))
