"""Results -> one picture: speed-ups by length, costs, acceptance, a text as it was written.

Knows matplotlib, which nobody else does; reckons nothing: see series.py.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.bench import series
from ggufspec.bench.records import Results
from ggufspec.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
_WIDTH = 9.0  # inches: at 100 a screen's inch, as wide as a README
_DPI = 200
# Okabe and Ito's, but for those that are too light on white: https://jfly.uni-koeln.de/color/
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vP"
_TIMES = "\N{MULTIPLICATION SIGN}"
_TICK = f"{{x:g}}{_TIMES}"
_INK, _QUIET, _FAINT = "#222222", "#666666", "#DDDDDD"
_DASHES = (0, (5, 2))
_FEW_BARS = 5  # fewer would be thicker
_MOST_REACH = 1.5  # of the best: an interval that goes on beyond says no more
_LETTER = 0.145  # inches of a line of text
_MANY = 3  # lines, of which bands would hide each other
_N_COLUMNS = 4  # of the key
_N_BAR = 30  # characters of a contender's name, and
_N_NAME = 44  # of a model's, that have room
_STYLE = {
    "axes.edgecolor": "#AAAAAA",
    "axes.grid": True,
    "axes.labelcolor": _QUIET,
    "axes.labelsize": 8.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "font.size": 8.5,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "ggufspec",  # otherwise no two files are the same
    "text.color": _INK,
    "text.parse_math": False,  # a name may have any characters
    "xtick.color": _QUIET,
    "xtick.labelsize": 8,
    "ytick.color": _QUIET,
    "ytick.labelsize": 8,
}


def check(path: Path) -> None:
    """Raise OptionError now where `draw` could not write there."""
    if path.suffix.lower() not in ENDINGS:
        raise OptionError(
            f"a plot cannot be written to {path}: it ends in {path.suffix or 'nothing'!r}; name a "
            f"file that ends in {' or '.join(ENDINGS)}"
        )
    folder = path.parent
    if not folder.is_dir():
        raise OptionError(
            f"a plot cannot be written to {path}: there is no folder {folder}; make it"
        )
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "it is a folder" if path.is_dir() else f"the folder {folder} takes no files"
        raise OptionError(f"a plot cannot be written to {path}: {why}; name another file")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "a plot needs matplotlib, which is not installed; install it by "
            "`pip install 'ggufspec[plot]'`, or leave the plot out"
        )


def draw(results: Results, path: Path) -> None:
    """Write the picture, whole or not at all; the same results make the same file.

    A panel is left out where nothing is known for it. Raises OptionError.
    """
    check(path)
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    kind = path.suffix.lower().removeprefix(".")
    part = path.with_name(f".{path.name[-100:]}.{secrets.token_hex(4)}.part")
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # A name may have characters that the font has not: they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        figure = _figure(results)
        canvas = FigureCanvasSVG(figure) if kind == "svg" else FigureCanvasAgg(figure)
        try:
            with part.open("xb") as file:
                metadata = {"Date": None} if kind == "svg" else {}
                canvas.print_figure(file, format=kind, dpi=_DPI, metadata=metadata)
            os.replace(part, path)
        except OSError as error:
            raise OptionError(
                f"a plot cannot be written to {path}: {error.strerror or error}; name another file"
            ) from error
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


# The page ----------------------------------------------------------------------------------------


def _figure(results: Results) -> Figure:
    """All panels there is something for, on one page."""
    from matplotlib.figure import Figure

    lines, (bars, n_more) = series.lines(results), series.bars(results)
    costs = series.stairs(results)
    accepted, race = series.acceptances(results), series.race(results)
    names = series.names(results)
    n_right = bool(accepted) + (race is not None)
    n_rows = -(-len(names) // _N_COLUMNS) + bool(names)
    head = 1.0 + 0.18 * n_rows  # inches
    height = head + (4.7 if n_right or costs[0] else 2.6)
    if not lines:
        height = max(height, head + 1.2 + 0.24 * len(bars) + (1.6 if costs[0] else 0))
    n_letters = 0 if lines else max((len(_short(bar.name, _N_BAR)) for bar in bars), default=0)
    figure = Figure(figsize=(_WIDTH, height))
    columns = figure.add_gridspec(
        *(1, 2 if n_right else 1),
        left=0.075 + 0.0062 * max(n_letters - 6, 0),
        right=0.955 if n_right else 0.93,
        top=1 - head / height,
        bottom=0.48 / height,
        wspace=0.36,
        width_ratios=[1.15, 1] if n_right else [1],
    )
    n_left = 1 + bool(costs[0])
    left = columns[0].subgridspec(n_left, 1, height_ratios=[2, 1][:n_left], hspace=0.42)
    main = figure.add_subplot(left[0])
    if lines:
        _draw_lines(main, lines)
    else:
        _draw_bars(main, bars, n_more)
    if costs[0]:
        _draw_costs(figure.add_subplot(left[1], sharex=main if lines else None), *costs)
    if n_right:
        right = columns[1].subgridspec(n_right, 1, hspace=0.42)
        if accepted:
            _draw_acceptances(figure.add_subplot(right[0]), accepted)
        if race:
            _draw_race(figure.add_subplot(right[n_right - 1]), race)
    _head(figure, results, height)
    if names:
        _key(figure, names, height)
    return figure


def _head(figure: Figure, results: Results, height: float) -> None:
    """What was measured, and on what."""
    target, draft = (_model(results.models.get(whose)) for whose in ("target", "draft"))
    title = " with ".join(filter(None, (target, draft))) or "Speculative decoding"
    size = 13 if len(title) < 60 else 11 if len(title) < 80 else 9.5
    figure.text(0.02, 1 - 0.16 / height, title, size=size, weight="bold", va="top")
    figure.text(0.02, 1 - 0.44 / height, _circumstances(results), size=8, color=_QUIET, va="top")


def _key(figure: Figure, names: Sequence[str], height: float) -> None:
    """Which colour is which way to draft, in all panels."""
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=_COLOURS[i], marker=_MARKERS[i], label=_short(name, 34))
        for i, name in enumerate(names)
    ]
    figure.legend(
        handles=[*entries, Line2D([], [], color=_QUIET, linestyle=_DASHES, label="its auto")],
        loc="upper left",
        bbox_to_anchor=(0.012, 1 - 0.66 / height),
        ncols=_N_COLUMNS,
        frameon=False,
        fontsize=8,
        borderaxespad=0,
        labelspacing=0.35,
    )


def _circumstances(results: Results) -> str:
    """One line in small type."""
    machine, told = results.machine, []
    if isinstance(machine.get("processor"), str):
        told.append(_short(machine["processor"], 60))
    if isinstance(machine.get("n_threads"), int):
        told.append(f"{machine['n_threads']} threads")
    n_prompts = len({text.prompt for text in results.measurements})
    n_runs = len({text.run for text in results.measurements})
    told.append(f"{_many(n_prompts, 'prompt')}, {_many(n_runs, 'run')}")
    version = results.versions.get("ggufspec")
    told += [f"ggufspec {_short(version, 20)}"] if isinstance(version, str) else []
    told += ["interrupted"] if results.interrupted else []
    return "  ·  ".join(told)


# The panels --------------------------------------------------------------------------------------


def _draw_lines(axes: Axes, lines: Sequence[series.Line]) -> None:
    axes.set_title("Speed-up by tokens drafted a round")
    labels = []
    n_most = max(max(line.lengths, default=1) for line in lines)
    n_least = min(min(line.lengths, default=n_most) for line in lines)
    shift = min(0.06 * (n_most - n_least) / max(len(lines), 1), 0.12)
    for i, line in enumerate(lines):
        colour = _COLOURS[line.number]
        if line.lengths:
            # Side by side, so that intervals do not hide each other.
            xs = [n + shift * (i - (len(lines) - 1) / 2) for n in line.lengths]
            ratios = [each.ratio for each in line.speedups]
            axes.errorbar(
                *(xs, ratios),
                yerr=_reaches(line.speedups),
                color=colour,
                marker=_MARKERS[line.number],
                elinewidth=0.8,
                capsize=2 if len(lines) < _MANY else 0,
            )
            if len(lines) == 1:
                labels.append((ratios[-1], "fixed", colour))
        if line.auto:
            axes.axhline(line.auto.ratio, color=colour, linestyle=_DASHES, linewidth=1.3)
            if len(lines) < _MANY and line.auto.low is not None and line.auto.high is not None:
                axes.axhspan(line.auto.low, line.auto.high, color=colour, alpha=0.1, linewidth=0)
            if len(lines) < _MANY:
                labels.append((line.auto.ratio, "auto", colour))
    axes.axhline(1, color=_QUIET, linewidth=1)
    labels.append((1.0, "plain", _QUIET))
    low, high = axes.get_ylim()
    ratios = [each.ratio for line in lines for each in (*line.speedups, line.auto) if each]
    axes.set_ylim(min(max(low, 0), 0.9), max(min(high, _MOST_REACH * max(ratios)), 1.1))
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_xlim(n_least - 0.5, n_most + 0.5)
    _whole_ticks(axes)
    axes.set_ylabel("times as fast as plain (95 % intervals)")
    axes.set_xlabel("tokens drafted a round")
    _label(axes, labels)


def _draw_bars(axes: Axes, bars: Sequence[series.Bar], n_more: int) -> None:
    axes.set_title(f"Tokens a second{' (the fastest)' if n_more else ''}")
    if not bars:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    places = range(len(bars))
    colours = [_COLOURS[0] if bar.speedup else "#A8A8A8" for bar in bars]
    axes.barh(places, [bar.rate for bar in bars], color=colours, height=0.62)
    for place, bar in zip(places, bars, strict=True):
        reach = bar.rate
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color=_INK, linewidth=1)
            reach = max(reach, bar.high)
        faster = f"  ({bar.speedup.ratio:.2f}{_TIMES})" if bar.speedup else ""
        axes.annotate(
            f"{bar.rate:.3g}{faster}",
            (reach, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    margin = max(_FEW_BARS - len(bars), 0) / 2
    axes.set_ylim(-0.6 - margin, len(bars) - 0.4 + margin)
    axes.set_yticks(list(places), [_short(bar.name, _N_BAR) for bar in bars], color=_INK)
    axes.tick_params("y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.28 * max(max(bar.rate, bar.high or 0) for bar in bars) or 1)
    more = f"\n{n_more} slower ones are left out" if n_more else ""
    axes.set_xlabel(f"tokens a second (median; lines: 95 % intervals of the mean){more}")


def _draw_costs(axes: Axes, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    axes.set_title("What a pass of the target costs")
    one = seconds[0]
    drafted = [n - 1 for n in sizes]
    ratios = [each / one for each in seconds]
    axes.step(drafted, ratios, where="mid", color=_QUIET, linewidth=1.2)
    axes.plot(drafted, ratios, "o", color=_QUIET, markersize=3)
    axes.set_ylim(min(0.8, min(ratios) - 0.1), max(1.3, 1.12 * max(ratios)))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.5), max(high, drafted[-1] + 0.5))
    _whole_ticks(axes)
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_ylabel("beside one token")
    axes.set_xlabel("tokens drafted: the pass reads one more")
    axes.text(
        *(0.02, 0.9, f"1{_TIMES} = {_ms(one)}"),
        color=_QUIET,
        size=8,
        transform=axes.transAxes,
        va="top",
    )


def _draw_acceptances(axes: Axes, accepted: Sequence[series.Acceptance]) -> None:
    axes.set_title("Drafts accepted as far as a position")
    labels = []
    n_seen: dict[int, int] = {}
    for each in accepted:
        n_seen[each.number] = n_seen.get(each.number, -1) + (not each.is_auto)
        colour = _COLOURS[each.number]
        axes.plot(
            *(range(1, len(each.shares) + 1), each.shares),
            color=colour,
            marker=_MARKERS[each.number],
            markersize=3.5,
            linestyle=_DASHES if each.is_auto else "-",
            alpha=1 if each.is_auto else max(1 - 0.3 * n_seen[each.number], 0.4),
        )
        labels.append((len(each.shares), each.shares[-1], each.name, colour))
    n_most = max(len(each.shares) for each in accepted)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.6, n_most + 0.4 + 0.04 * n_most)
    axes.yaxis.set_major_formatter(_percent())
    _whole_ticks(axes)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("of the drafts that long")
    _label_ends(axes, labels)


def _draw_race(axes: Axes, race: series.Race) -> None:
    axes.set_title("A text as it was written")
    both = ((race.plain, _QUIET), (race.best, _COLOURS[1]))
    corners = ((0.02, 0.97, "left", "top"), (0.98, 0.05, "right", "bottom"))  # nobody passes there
    for written, colour in both:
        axes.step(written.seconds, written.tokens, where="post", color=colour, linewidth=1.3)
    by_end = sorted(both, key=lambda each: each[0].seconds[-1])
    for (written, colour), (x, y, across, up) in zip(by_end, corners, strict=True):
        axes.text(
            *(x, y, f"{_short(written.name, 32)}: {written.seconds[-1]:.3g} s"),
            color=colour,
            weight="bold",
            transform=axes.transAxes,
            ha=across,
            va=up,
        )
    axes.set_xlim(0, 1.02 * by_end[-1][0].seconds[-1])
    axes.set_ylim(0, 1.18 * race.n_tokens)
    part = "" if race.is_whole else f", its first {race.n_tokens} tokens"
    axes.set_xlabel(f"seconds of writing (prompt: {_short(race.prompt, 20)}{part})")
    axes.set_ylabel("tokens")


# Helpers -----------------------------------------------------------------------------------------


def _label(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Names to the right of the lines that reach there: height, name, colour."""
    places = _apart(axes, [y for y, _, _ in labels])
    for place, (_, name, colour) in zip(places, labels, strict=True):
        axes.annotate(
            *(_short(name, 22), (1, place)),
            xytext=(4, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Names where the lines end: place, height, name, colour."""
    from matplotlib.patheffects import withStroke

    for end in sorted({x for x, _, _, _ in labels}):
        here = [label for label in labels if label[0] == end]
        places = _apart(axes, [y for _, y, _, _ in here])
        for place, (x, _, name, colour) in zip(places, here, strict=True):
            axes.annotate(
                *(_short(name, 12), (x, place)),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                annotation_clip=False,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )


def _apart(axes: Axes, heights: Sequence[float]) -> list[float]:
    """Heights for names, moved apart where they would overlap, within the axes."""
    low, high = axes.get_ylim()
    gap = (high - low) * _LETTER * axes.figure.dpi / axes.get_window_extent().height
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    places = list(heights)
    for below, i in zip([None, *order], order, strict=False):
        places[i] = max(places[i], low if below is None else places[below] + gap)
    for above, i in zip([None, *order[::-1]], order[::-1], strict=False):
        places[i] = min(places[i], high if above is None else places[above] - gap)
    return places


def _reaches(speedups: Sequence[Any]) -> list[list[float]]:
    """How far the intervals reach down and up; nothing where there is none."""
    return [
        [each.ratio - each.low if each.low is not None else 0.0 for each in speedups],
        [each.high - each.ratio if each.high is not None else 0.0 for each in speedups],
    ]


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 4, 5, 10]))


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1, decimals=0, symbol=" %")


def _model(value: object) -> str:
    """The name of a model, from its name or its path, or an object that has one of them."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("name", "file", "path") if value.get(key)), None)
    if not isinstance(value, str):
        return ""
    name = value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    return _short(name.removesuffix(".gguf"), _N_NAME)


def _short(name: str, n_most: int) -> str:
    """A name in one line, its middle left out where it is too long."""
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)
    if len(line) <= n_most:
        return line
    half = (n_most - 1) // 2
    return f"{line[: n_most - 1 - half]}…{line[-half:]}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
