"""Draws results in one picture: speed-ups by length, pass costs, acceptance, a timeline."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.bench import plot_data
from ggufspec.bench.records import BenchResults
from ggufspec.bench.summary import Speedup, Summary
from ggufspec.common.facts import counted
from ggufspec.common.files import check_writable, write_file
from ggufspec.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_STYLE = Path(__file__).with_suffix(".mplstyle")
_WIDTH, _HEIGHT = 9.0, 5.7  # inches
_BAR_HEIGHT = 0.24  # inches
_DPI = 200
_N_COLUMNS = 4  # of the legend
_N_BAR = 30  # maximum characters of a name beside a bar
# Okabe and Ito's colours, except those too light on white: https://jfly.uni-koeln.de/color/
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vP"
_QUIET = "#666666"
_DASHES = (0, (5, 2))
_TIMES = "\N{MULTIPLICATION SIGN}"
_TICK = f"{{x:g}}{_TIMES}"
_MAX_REACH = 1.5  # the axis ends at this multiple of the best speed-up, at most
_FEW_BARS = 5  # with fewer bars, space is left empty, so that bars are not thick
_MANY = 3  # from this number of lines on, confidence bands would overlap


def check(path: Path) -> None:
    """Raise OptionError or CacheError if `draw` could not write this file."""
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(
            f"a plot cannot be written to {path}: its suffix is {path.suffix!r}; name a file with "
            f"the suffix {' or '.join(SUFFIXES)}"
        )
    check_writable(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "a plot needs matplotlib, which is not installed; install it with "
            "`pip install 'ggufspec[plot]'`, or leave out --plot"
        )


def draw(results: BenchResults, path: Path) -> None:
    """Draw results and write the picture atomically; equal results give equal files.

    Subplots without data are left out. Raises OptionError, CacheError.
    """
    check(path)
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    kind = path.suffix.lower().removeprefix(".")
    picture = BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # Characters that the font does not have are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure = _figure(results)
        canvas = FigureCanvasSVG(figure) if kind == "svg" else FigureCanvasAgg(figure)
        metadata = {"Date": None} if kind == "svg" else {}
        canvas.print_figure(picture, format=kind, dpi=_DPI, metadata=metadata)
    write_file(path, picture.getvalue())


def _figure(results: BenchResults) -> Figure:
    from matplotlib.figure import Figure

    lines, (bars, n_more) = plot_data.speedup_lines(results), plot_data.rate_bars(results)
    sizes, seconds = plot_data.pass_costs(results)
    accepted, timelines = plot_data.acceptances(results), plot_data.timelines(results)
    # Each column has six cells, which its subplots share from top to bottom.
    columns = [["main"] * 4 + ["costs" if sizes else "main"] * 2]
    if right := ["accepted"] * bool(accepted) + ["timelines"] * bool(timelines):
        columns.append([right[0]] * 3 + [right[-1]] * 3)
    height = _HEIGHT if lines else max(_HEIGHT, 3.5 + _BAR_HEIGHT * len(bars))
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplot_mosaic([list(row) for row in zip(*columns, strict=True)])
    if lines:
        _draw_lines(axes["main"], lines)
    else:
        _draw_bars(axes["main"], bars, n_more)
    if sizes:
        if lines:
            axes["costs"].sharex(axes["main"])
        _draw_costs(axes["costs"], sizes, seconds)
    if accepted:
        _draw_acceptances(axes["accepted"], accepted)
    if timelines:
        _draw_timelines(axes["timelines"], timelines)
    figure.suptitle(_title(results), x=0.01, ha="left", size=11)
    if names := plot_data.series_names(results):
        _legend(figure, names)
    return figure


def _draw_lines(axes: Axes, lines: Sequence[plot_data.SpeedupLine]) -> None:
    """Speed-ups by length with their intervals; auto as a dashed line, plain at 1."""
    axes.set_title("Speed-up by draft length")
    n_most = max(max(line.lengths, default=1) for line in lines)
    n_least = min(min(line.lengths, default=n_most) for line in lines)
    shift = min(0.06 * (n_most - n_least) / len(lines), 0.12)
    for i, line in enumerate(lines):
        colour = _COLOURS[line.number]
        if line.lengths:
            found = line.speedups
            axes.errorbar(
                # Shifted sideways, so that intervals do not overlap.
                [n + shift * (i - (len(lines) - 1) / 2) for n in line.lengths],
                [each.ratio for each in found],
                yerr=[  # lengths of the intervals downwards and upwards; 0 without an interval
                    [0.0 if each.low is None else each.ratio - each.low for each in found],
                    [0.0 if each.high is None else each.high - each.ratio for each in found],
                ],
                color=colour,
                marker=_MARKERS[line.number],
                elinewidth=0.8,
                capsize=2 if len(lines) < _MANY else 0,
                label="fixed",
            )
        if line.auto:
            axes.axhline(
                line.auto.ratio, color=colour, linestyle=_DASHES, linewidth=1.3, label="auto"
            )
            if len(lines) < _MANY and line.auto.low is not None and line.auto.high is not None:
                axes.axhspan(line.auto.low, line.auto.high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(1, color=_QUIET, linewidth=1, label="plain")
    if len(lines) == 1:
        axes.legend()
    low, high = axes.get_ylim()
    best = max(each.ratio for line in lines for each in (*line.speedups, line.auto) if each)
    axes.set_ylim(min(max(low, 0), 0.9), max(min(high, _MAX_REACH * best), 1.1))
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_xlim(n_least - 0.5, n_most + 0.5)
    _whole_ticks(axes)
    axes.set_ylabel("speed-up over plain (95 % intervals)")
    axes.set_xlabel("draft length (tokens per round)")


def _draw_bars(axes: Axes, bars: Sequence[tuple[Summary, Speedup | None]], n_more: int) -> None:
    """Tokens per second, see plot_data.rate_bars; `n_more`: number of contenders left out."""
    axes.set_title(f"Tokens/s{' (the fastest)' if n_more else ''}")
    if not bars:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names = [_short(row.contender.name, _N_BAR) for row, _ in bars]
    colours = [_COLOURS[0] if row.speedup else "#A8A8A8" for row, _ in bars]
    axes.barh(range(len(bars)), [row.median for row, _ in bars], color=colours, height=0.62)
    ends = []
    for place, (row, mean) in enumerate(bars):
        ends.append(row.median)
        if mean and mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [place, place], color="#222222", linewidth=1)
            ends[-1] = max(row.median, mean.high)
        faster = f"  ({row.speedup.ratio:.2f}{_TIMES})" if row.speedup else ""
        axes.text(ends[-1], place, f" {row.median:.3g}{faster}", va="center")
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(max(len(bars), _FEW_BARS) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.28 * max(ends) or 1)
    more = f"\n{counted(n_more, 'slower contender')} not shown" if n_more else ""
    axes.set_xlabel(f"tokens/s (median; lines: 95 % intervals of the mean){more}")


def _draw_costs(axes: Axes, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    axes.set_title("Time of a target pass")
    drafted = [n - 1 for n in sizes]
    ratios = [each / seconds[0] for each in seconds]
    axes.step(drafted, ratios, "o-", where="mid", color=_QUIET, linewidth=1.2, markersize=3)
    axes.set_ylim(min(0.8, min(ratios) - 0.1), max(1.3, 1.12 * max(ratios)))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.5), max(high, drafted[-1] + 0.5))
    _whole_ticks(axes)
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_ylabel(f"relative to one\ntoken ({1e3 * seconds[0]:.3g} ms)")
    axes.set_xlabel("draft length (the pass has one token more)")


def _draw_acceptances(axes: Axes, accepted: Sequence[plot_data.AcceptanceCurve]) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_title("Drafts accepted up to a position")
    n_seen: dict[int, int] = {}
    for each in accepted:
        n_seen[each.number] = n_seen.get(each.number, -1) + (not each.is_auto)
        axes.plot(
            *(range(1, len(each.shares) + 1), each.shares),
            color=_COLOURS[each.number],
            marker=_MARKERS[each.number],
            markersize=3.5,
            linestyle=_DASHES if each.is_auto else "-",
            alpha=1 if each.is_auto else max(1 - 0.3 * n_seen[each.number], 0.4),
            label=_short(each.name, 12),
        )
    axes.legend(title="draft length", ncols=2)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    _whole_ticks(axes)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of drafts at least that long")


def _draw_timelines(axes: Axes, timelines: plot_data.TimelinePair) -> None:
    axes.set_title("One text over time")
    for each, colour in ((timelines.plain, _QUIET), (timelines.best, _COLOURS[1])):
        name = f"{_short(each.name, 27)}: {each.seconds[-1]:.3g} s"
        axes.step(each.seconds, each.tokens, where="post", color=colour, linewidth=1.3, label=name)
    axes.legend(loc="lower right")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    part = "" if timelines.is_whole else f", its first {timelines.n_tokens} tokens"
    axes.set_xlabel(f"seconds (prompt: {_short(timelines.prompt, 20)}{part})")
    axes.set_ylabel("tokens")


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 4, 5, 10]))


def _legend(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=_COLOURS[i], marker=_MARKERS[i], label=_short(name, 34))
        for i, name in enumerate(names)
    ]
    entries.append(Line2D([], [], color=_QUIET, linestyle=_DASHES, label="auto of that colour"))
    figure.legend(handles=entries, loc="outside lower left", ncols=_N_COLUMNS)


def _title(results: BenchResults) -> str:
    facts: Mapping[str, Any] = next(iter(results.models.values()), {})
    facts = facts if isinstance(facts, Mapping) else {}
    files = [facts.get(whose) for whose in ("target", "draft")]
    names = [_short(file.removesuffix(".gguf"), 44) for file in files if isinstance(file, str)]
    cpu, n_threads = results.machine.get("cpu"), facts.get("target_threads")
    version = results.versions.get("ggufspec")
    n_prompts = len({text.prompt for text in results.measurements})
    n_runs = len({text.run for text in results.measurements})
    parts = [
        _short(cpu, 60) if isinstance(cpu, str) else "",
        counted(n_threads, "thread") if isinstance(n_threads, int) else "",
        f"{counted(n_prompts, 'prompt')}, {counted(n_runs, 'run')}",
        f"ggufspec {_short(version, 20)}" if isinstance(version, str) else "",
        "interrupted" if results.interrupted else "",
    ]
    models = " with ".join(filter(None, names)) or "Speculative decoding"
    return f"{models}\n{'  ·  '.join(filter(None, parts))}"


def _short(name: str, n_most: int) -> str:
    """A name in one line of at most `n_most` characters; a longer name loses its middle."""
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)
    if len(line) <= n_most:
        return line
    half = (n_most - 1) // 2
    return f"{line[: n_most - 1 - half]}…{line[-half:]}"
