"""Draws the subplots of a plot into given axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggufspec.bench import plot_data
from ggufspec.bench.summary import Speedup, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours without those that are too light on white: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP"
INK, QUIET = "#222222", "#666666"
DASHES = (0, (5, 2))
N_BAR = 30  # characters of a contender's name
_TIMES = "\N{MULTIPLICATION SIGN}"
_TICK = f"{{x:g}}{_TIMES}"
_FEW_BARS = 5  # fewer are not drawn thicker
_MAX_REACH = 1.5  # x the best speed-up: the end of the axis
_LINE_HEIGHT = 0.145  # inches of a line of text
_MANY = 3  # lines, whose confidence bands would overlap


def draw_lines(axes: Axes, lines: Sequence[plot_data.SpeedupLine]) -> None:
    """Speed-ups by length with their intervals; auto as a dashed line, plain at 1."""
    axes.set_title("Speed-up by draft length")
    labels = []
    n_most = max(max(line.lengths, default=1) for line in lines)
    n_least = min(min(line.lengths, default=n_most) for line in lines)
    shift = min(0.06 * (n_most - n_least) / max(len(lines), 1), 0.12)
    for i, line in enumerate(lines):
        colour = COLOURS[line.number]
        if line.lengths:
            # Shifted, so that intervals do not overlap.
            xs = [n + shift * (i - (len(lines) - 1) / 2) for n in line.lengths]
            ratios = [each.ratio for each in line.speedups]
            # How far the intervals reach down and up; 0 without one.
            below = [0.0 if each.low is None else each.ratio - each.low for each in line.speedups]
            above = [0.0 if each.high is None else each.high - each.ratio for each in line.speedups]
            axes.errorbar(
                *(xs, ratios),
                yerr=[below, above],
                color=colour,
                marker=MARKERS[line.number],
                elinewidth=0.8,
                capsize=2 if len(lines) < _MANY else 0,
            )
            if len(lines) == 1:
                labels.append((1, ratios[-1], "fixed", colour))
        if line.auto:
            axes.axhline(line.auto.ratio, color=colour, linestyle=DASHES, linewidth=1.3)
            if len(lines) < _MANY and line.auto.low is not None and line.auto.high is not None:
                axes.axhspan(line.auto.low, line.auto.high, color=colour, alpha=0.1, linewidth=0)
            if len(lines) < _MANY:
                labels.append((1, line.auto.ratio, "auto", colour))
    axes.axhline(1, color=QUIET, linewidth=1)
    labels.append((1, 1.0, "plain", QUIET))
    low, high = axes.get_ylim()
    ratios = [each.ratio for line in lines for each in (*line.speedups, line.auto) if each]
    axes.set_ylim(min(max(low, 0), 0.9), max(min(high, _MAX_REACH * max(ratios)), 1.1))
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_xlim(n_least - 0.5, n_most + 0.5)
    _whole_ticks(axes)
    axes.set_ylabel("speed-up over plain (95 % intervals)")
    axes.set_xlabel("draft length (tokens per round)")
    _label(axes, labels, xycoords=axes.get_yaxis_transform())  # at the right edge


def draw_bars(axes: Axes, bars: Sequence[tuple[Summary, Speedup | None]], n_more: int) -> None:
    """Tokens per second, see plot_data.rate_bars; `n_more`: how many are left out."""
    axes.set_title(f"Tokens/s{' (the fastest)' if n_more else ''}")
    if not bars:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    places = range(len(bars))
    colours = [COLOURS[0] if row.speedup else "#A8A8A8" for row, _ in bars]
    axes.barh(places, [row.median for row, _ in bars], color=colours, height=0.62)
    ends = []
    for place, (row, mean) in zip(places, bars, strict=True):
        ends.append(row.median)
        if mean and mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [place, place], color=INK, linewidth=1)
            ends[-1] = max(row.median, mean.high)
        faster = f"  ({row.speedup.ratio:.2f}{_TIMES})" if row.speedup else ""
        _annotate(axes, f"{row.median:.3g}{faster}", (ends[-1], place))
    margin = max(_FEW_BARS - len(bars), 0) / 2
    axes.set_ylim(-0.6 - margin, len(bars) - 0.4 + margin)
    axes.set_yticks(list(places), [short(row.contender.name, N_BAR) for row, _ in bars], color=INK)
    axes.tick_params("y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.28 * max(ends) or 1)
    more = f"\n{n_more} slower ones are left out" if n_more else ""
    axes.set_xlabel(f"tokens/s (median; lines: 95 % intervals of the mean){more}")


def draw_costs(axes: Axes, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """The time of a pass by its size, relative to one token."""
    axes.set_title("Time of a target pass")
    one = seconds[0]
    drafted = [n - 1 for n in sizes]
    ratios = [each / one for each in seconds]
    axes.step(drafted, ratios, where="mid", color=QUIET, linewidth=1.2)
    axes.plot(drafted, ratios, "o", color=QUIET, markersize=3)
    axes.set_ylim(min(0.8, min(ratios) - 0.1), max(1.3, 1.12 * max(ratios)))
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.5), max(high, drafted[-1] + 0.5))
    _whole_ticks(axes)
    axes.yaxis.set_major_formatter(_TICK)
    axes.set_ylabel("relative to one token")
    axes.set_xlabel("draft length (the pass has one token more)")
    axes.text(
        *(0.02, 0.9, f"1{_TIMES} = {1e3 * one:.3g} ms"),
        color=QUIET,
        size=8,
        transform=axes.transAxes,
        va="top",
    )


def draw_acceptances(axes: Axes, accepted: Sequence[plot_data.Acceptance]) -> None:
    """The share of drafts accepted up to each position."""
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import PercentFormatter

    axes.set_title("Drafts accepted up to a position")
    labels = []
    n_seen: dict[int, int] = {}
    for each in accepted:
        n_seen[each.number] = n_seen.get(each.number, -1) + (not each.is_auto)
        colour = COLOURS[each.number]
        axes.plot(
            *(range(1, len(each.shares) + 1), each.shares),
            color=colour,
            marker=MARKERS[each.number],
            markersize=3.5,
            linestyle=DASHES if each.is_auto else "-",
            alpha=1 if each.is_auto else max(1 - 0.3 * n_seen[each.number], 0.4),
        )
        labels.append((len(each.shares), each.shares[-1], short(each.name, 12), colour))
    n_most = max(len(each.shares) for each in accepted)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.6, n_most + 0.4 + 0.04 * n_most)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    _whole_ticks(axes)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of the drafts that long")
    _label(axes, labels, path_effects=[withStroke(linewidth=2.5, foreground="white")])


def draw_timelines(axes: Axes, timelines: plot_data.TimelinePair) -> None:
    """Tokens over seconds of one text, round by round."""
    axes.set_title("One text over time")
    both = ((timelines.plain, QUIET), (timelines.best, COLOURS[1]))
    corners = ((0.02, 0.97, "left", "top"), (0.98, 0.05, "right", "bottom"))  # without lines
    for each, colour in both:
        axes.step(each.seconds, each.tokens, where="post", color=colour, linewidth=1.3)
    by_end = sorted(both, key=lambda pair: pair[0].seconds[-1])
    for (each, colour), (x, y, across, up) in zip(by_end, corners, strict=True):
        axes.text(
            *(x, y, f"{short(each.name, 27)}: {each.seconds[-1]:.3g} s"),
            color=colour,
            weight="bold",
            transform=axes.transAxes,
            ha=across,
            va=up,
        )
    axes.set_xlim(0, 1.02 * by_end[-1][0].seconds[-1])
    axes.set_ylim(0, 1.18 * timelines.n_tokens)
    part = "" if timelines.is_whole else f", its first {timelines.n_tokens} tokens"
    axes.set_xlabel(f"seconds (prompt: {short(timelines.prompt, 20)}{part})")
    axes.set_ylabel("tokens")


def short(name: str, n_most: int) -> str:
    """A name in one line; the middle is left out if it is too long."""
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name)
    if len(line) <= n_most:
        return line
    half = (n_most - 1) // 2
    return f"{line[: n_most - 1 - half]}…{line[-half:]}"


def _label(axes: Axes, labels: Sequence[tuple[float, float, str, str]], **style: Any) -> None:
    """Names at the ends of lines, from (place, height, name, colour)."""
    for end in sorted({x for x, _, _, _ in labels}):
        here = [label for label in labels if label[0] == end]
        places = _apart(axes, [y for _, y, _, _ in here])
        for place, (x, _, name, colour) in zip(places, here, strict=True):
            _annotate(axes, short(name, 22), (x, place), color=colour, **style)


def _annotate(axes: Axes, text: str, at: tuple[float, float], **style: Any) -> None:
    axes.annotate(
        text,
        at,
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        annotation_clip=False,
        **style,
    )


def _apart(axes: Axes, heights: Sequence[float]) -> list[float]:
    """Heights for names within the axes, moved apart so that they do not overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * _LINE_HEIGHT * axes.figure.dpi / axes.get_window_extent().height
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    places = list(heights)
    for below, i in zip([None, *order], order, strict=False):
        places[i] = max(places[i], low if below is None else places[below] + gap)
    for above, i in zip([None, *order[::-1]], order[::-1], strict=False):
        places[i] = min(places[i], high if above is None else places[above] - gap)
    return places


def _whole_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 4, 5, 10]))
