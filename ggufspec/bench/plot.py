"""Draws results as one picture: speed-ups by length, pass costs, acceptance, a timeline."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggufspec.bench import plot_data, subplots
from ggufspec.bench.records import BenchResults
from ggufspec.bench.subplots import COLOURS, DASHES, MARKERS, N_BAR, QUIET, short
from ggufspec.common.facts import counted
from ggufspec.common.files import check_writable, write_file
from ggufspec.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_WIDTH = 9.0  # inches
_DPI = 200
_N_COLUMNS = 4  # of the legend
_N_NAME = 44  # characters of a model's name
_STYLE = Path(__file__).with_suffix(".mplstyle")


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
    """Write the picture atomically; equal results give equal files.

    A subplot without data is left out. Raises OptionError, CacheError.
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
    costs = plot_data.pass_costs(results)
    accepted, timelines = plot_data.acceptances(results), plot_data.timelines(results)
    names = plot_data.series_names(results)
    n_right = bool(accepted) + (timelines is not None)
    n_rows = -(-len(names) // _N_COLUMNS) + bool(names)
    head = 1.0 + 0.18 * n_rows  # inches
    height = head + (4.7 if n_right or costs[0] else 2.6)
    if not lines:
        height = max(height, head + 1.2 + 0.24 * len(bars) + (1.6 if costs[0] else 0))
    n_letters = (
        0 if lines else max((len(short(row.contender.name, N_BAR)) for row, _ in bars), default=0)
    )
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
        subplots.draw_lines(main, lines)
    else:
        subplots.draw_bars(main, bars, n_more)
    if costs[0]:
        subplots.draw_costs(figure.add_subplot(left[1], sharex=main if lines else None), *costs)
    if n_right:
        right = columns[1].subgridspec(n_right, 1, hspace=0.42)
        if accepted:
            subplots.draw_acceptances(figure.add_subplot(right[0]), accepted)
        if timelines:
            subplots.draw_timelines(figure.add_subplot(right[n_right - 1]), timelines)
    _title(figure, results, height)
    if names:
        _legend(figure, names, height)
    return figure


def _title(figure: Figure, results: BenchResults, height: float) -> None:
    files = [_first_models(results).get(whose) for whose in ("target", "draft")]
    names = [short(file.removesuffix(".gguf"), _N_NAME) for file in files if isinstance(file, str)]
    title = " with ".join(filter(None, names)) or "Speculative decoding"
    size = 13 if len(title) < 60 else 11 if len(title) < 80 else 9.5
    figure.text(0.02, 1 - 0.16 / height, title, size=size, weight="bold", va="top")
    figure.text(0.02, 1 - 0.44 / height, _circumstances(results), size=8, color=QUIET, va="top")


def _legend(figure: Figure, names: Sequence[str], height: float) -> None:
    from matplotlib.lines import Line2D

    entries = [
        Line2D([], [], color=COLOURS[i], marker=MARKERS[i], label=short(name, 34))
        for i, name in enumerate(names)
    ]
    auto = Line2D([], [], color=QUIET, linestyle=DASHES, label="auto of that colour")
    figure.legend(
        handles=[*entries, auto],
        loc="upper left",
        bbox_to_anchor=(0.012, 1 - 0.66 / height),
        ncols=_N_COLUMNS,
        frameon=False,
        fontsize=8,
        borderaxespad=0,
        labelspacing=0.35,
    )


def _circumstances(results: BenchResults) -> str:
    cpu, n_threads = results.machine.get("cpu"), _first_models(results).get("target_threads")
    version = results.versions.get("ggufspec")
    n_prompts = len({text.prompt for text in results.measurements})
    n_runs = len({text.run for text in results.measurements})
    parts = [
        short(cpu, 60) if isinstance(cpu, str) else "",
        counted(n_threads, "thread") if isinstance(n_threads, int) else "",
        f"{counted(n_prompts, 'prompt')}, {counted(n_runs, 'run')}",
        f"ggufspec {short(version, 20)}" if isinstance(version, str) else "",
        "interrupted" if results.interrupted else "",
    ]
    return "  ·  ".join(filter(None, parts))


def _first_models(results: BenchResults) -> Mapping[str, Any]:
    facts = next(iter(results.models.values()), None)
    return facts if isinstance(facts, Mapping) else {}
