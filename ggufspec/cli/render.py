"""Formats results: text with accepted tokens in colour, statistics, tables, plots, JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import click

from ggufspec.common.facts import counted, visible
from ggufspec.decoding.tree import leaves, n_equal, path_to

if TYPE_CHECKING:
    from ggufspec.decoding.stats import Stats
    from ggufspec.decoding.types import Round
    from ggufspec.engine.text import Chunk

_PACKAGES = ("ggufspec", "llama-cpp-python", "numpy")
_NOTES = {  # how -v describes tokens of other drafters
    "forced": "forced by the constraint",
    "predicted": "from the prediction",
    "staged": "drafted for the draft",
}


def wants_color(choice: str, stream: IO[str]) -> bool:
    """Whether to use colour; "auto": if the terminal has colours and NO_COLOR is not set."""
    if choice != "auto":
        return choice == "on"
    return is_terminal(stream) and "NO_COLOR" not in os.environ


def is_terminal(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal with colours and a movable cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def note(message: str) -> None:
    """Print a message on stderr, prefixed with the program's name."""
    echo(f"ggufspec: {message}", err=True)


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line; control characters are escaped on stderr and on terminals."""
    click.echo(visible(text) if err else for_stdout(text), err=err)


def for_stdout(text: str) -> str:
    """The text to write to stdout: control characters are escaped if it is a terminal."""
    return visible(text) if sys.stdout.isatty() else text


class TextWriter:
    """Writes chunks to stdout as they come; accepted draft tokens are green if colour is on."""

    def __init__(self, *, color: bool) -> None:
        self._color = color
        tolerate_letters()

    def write(self, chunk: Chunk) -> None:
        text = for_stdout(chunk.text)
        if self._color and text and chunk.drafted and chunk.drafted[0]:
            text = click.style(text, fg="green")
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        click.echo()


def stats_line(stats: Stats, speedup: float | None = None) -> str:
    parts = [f"{counted(stats.n_generated, 'token')} at {stats.tokens_per_second:.1f} tokens/s"]
    if speedup is not None:
        parts.append(f"{speedup:.2f} times as fast as plain decoding")
    if stats.n_drafted:
        parts.append(
            f"drafted {stats.n_drafted}, accepted {stats.n_accepted} ({stats.acceptance:.1%}), "
            f"{stats.mean_length:.2f} tokens/round"
        )
    if 0 < stats.n_rounds_without_draft < stats.n_rounds:
        share = stats.n_rounds_without_draft / stats.n_rounds
        parts.append(f"{share:.0%} of rounds without a draft")
    reused = f", {stats.n_prompt_reused} of them reused," if stats.n_prompt_reused else ""
    prompt = f"prompt {counted(stats.n_prompt, 'token')}{reused}"
    parts.append(f"{prompt} in {stats.seconds.prompt:.2f} s")
    return "; ".join(parts)


def rounds_text(rounds: Sequence[Round], piece: Callable[[int], bytes], *, color: bool) -> str:
    """Describes each round in a line: drafted, accepted, expected, times, reason for the length.

    A second line shows the branches of a tree; `piece` is the text of a token.
    """
    lines = []
    for i, round_ in enumerate(rounds, 1):
        expected = "" if round_.expected is None else f" ({round_.expected:.1f} expected)"
        draft_ms, target_ms = 1e3 * round_.draft_seconds, 1e3 * round_.target_seconds
        branches = _branches(round_, piece, color=color)
        shape = f" in {len(branches)} branches" if branches else ""
        lines.append(
            f"round {i}: drafted {round_.n_drafted}{shape}, "
            f"accepted {round_.n_accepted}{expected}, "
            f"draft {draft_ms:.1f} ms, target {target_ms:.1f} ms"
            + (f"; {round_.why}" if round_.why else "")
        )
        if branches:
            accepted = _escaped(round_.tokens[: round_.n_accepted], piece)
            lines.append(f"  {' | '.join(branches)} -> accepted '{accepted}'")
    return "\n".join(lines)


def _branches(round_: Round, piece: Callable[[int], bytes], *, color: bool) -> list[str]:
    accepted = round_.tokens[: round_.n_accepted]
    texts = []
    for leaf in leaves(round_.parents):
        tokens = [round_.drafted_tokens[node] for node in path_to(round_.parents, leaf)]
        n = n_equal(tokens, accepted)
        start, rest = _escaped(tokens[:n], piece), _escaped(tokens[n:], piece)
        texts.append(f"'{click.style(start, fg='green') if color and n else start}{rest}'")
    return texts


def _escaped(tokens: Sequence[int], piece: Callable[[int], bytes]) -> str:
    text = b"".join(map(piece, tokens)).decode("utf-8", "replace")
    return repr(text + '"')[1:-2]  # the quote makes repr escape single ones


def details_text(stats: Stats) -> str:
    """Describes the shares of the time, and the acceptance at each position of a draft."""
    seconds, generation = stats.seconds, stats.seconds.generation or 1.0
    parts = ("draft", "target", "verify", "other")
    shares = ", ".join(f"{name} {getattr(seconds, name) / generation:.1%}" for name in parts)
    lines = [f"time: {shares}"]
    if any(stats.threads.values()):
        used = [f"{name} {_shares(of_all)}" for name, of_all in stats.threads.items() if of_all]
        lines.append(f"threads: {', '.join(used)}")
    if stats.n_drafted:
        positions = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
        accepted = " ".join(f"{a / d:.0%}" if d else "-" for a, d in positions)
        lines.append(f"accepted by position: {accepted}")
    for name, what in _NOTES.items():
        if n := int(stats.notes.get(f"n_{name}", 0)):
            share = stats.notes[f"{name}_acceptance"]
            lines.append(f"{what}: {counted(n, 'token')}, {share:.1%} accepted")
    if stats.n_expected is not None and stats.n_drafted:
        lines.append(
            f"expected to be accepted: {stats.n_expected:.1f}; accepted: {stats.n_accepted}"
        )
    return "\n".join(lines)


def _shares(seconds: Mapping[int, float]) -> str:
    """Numbers of threads, the most used first; with their shares of the time if there are some."""
    if len(seconds) == 1:
        return str(*seconds)
    whole = sum(seconds.values())
    by_time = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{n} ({share / whole:.0%})" for n, share in by_time)


def stats_json(stats: Stats) -> dict[str, Any]:
    found = asdict(stats)
    del found["n_prompt_reused"]  # commands reuse no earlier prompts
    rates = ("acceptance", "mean_length", "mean_depth", "overhead", "tokens_per_second")
    return found | {name: getattr(stats, name) for name in rates}


def echo_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a small table, numbers to the right, and an empty line."""
    head, *lines = table_lines(header, rows, width_of_stdout())
    echo("\n".join([head, "-" * len(head), *lines, ""]))


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """An aligned table, numbers to the right. Columns beyond `width` go into tables below it."""
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
    """Print left-aligned columns, which are not cut off on a narrow terminal."""
    widths = column_widths(rows)
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        echo("  ".join(cells).rstrip())


def column_widths(rows: list[list[str]]) -> list[int]:
    """The widths of the columns that echo_rows prints, without the two blanks between columns."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def width_of_stdout() -> int:
    """The width of the terminal, or no limit without one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def echo_bars(values: Sequence[float], names: Sequence[str]) -> None:
    """Print a bar for each value beside its name; in ASCII if stdout cannot encode blocks."""
    block = "█" if can_write("█") else "#"
    margin = max(map(len, names)) + 1
    room = max(shutil.get_terminal_size().columns - margin, 1)
    for value, name in zip(values, names, strict=True):
        click.echo(f"{name:<{margin}}{block * round(room * value / max(values))}")


def tolerate_letters() -> None:
    """Make stdout replace the characters that it cannot encode, instead of failing."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")


def can_write(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version  # takes long to import

    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def echo_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False).encode("utf-8", "replace"))
