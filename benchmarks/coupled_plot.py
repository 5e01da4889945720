"""Plot of the benchmark: memory and time against the batch size."""

# matplotlib leaves the types of its keyword arguments open:
# pyright: standard

from collections.abc import Sequence
from typing import Any

from coupled_ways import WAYS
from coupled_work import Work
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from superbatch.lab.plot.style import BLUE, GREEN, LIGHT, ORANGE, PURPLE, SKY, VERMILION, plain_axes, png

GREY = "#8a8f98"
STYLES = {  # colour, marker, dashes, width
    "full": ("#1a1a1a", "s", "solid", 1.4),
    "offload": (PURPLE, "^", (0, (5, 2)), 1.4),
    "checkpoint": (ORANGE, "v", (0, (5, 2)), 1.4),
    "accumulation": (VERMILION, "x", (0, (1.5, 1.5)), 2.0),
    "gradcache": (GREY, "D", (0, (6, 2, 1, 2)), 1.4),
    "cached": (GREEN, "P", "solid", 1.4),
    "virtual": (SKY, "o", "solid", 2.0),
    "virtual-host": (BLUE, "o", "solid", 2.4),
}


def picture(works: Sequence[Work], rows: Sequence[Any]) -> bytes:
    """Draw the plot: a column for each work, memory on the device above, CPU time below.

    Args:
        works: trainings in the order of the columns.
        rows: a `coupled.Row` for each method and batch size, with one micro-batch size.

    Returns:
        A PNG file's content.
    """
    figure = Figure(figsize=(3.4 * len(works) + 0.8, 7.2), facecolor=LIGHT.paper, layout="constrained")
    grid = figure.subplots(2, len(works), squeeze=False, sharex=True)
    lines: dict[str, Any] = {}
    sizes = sorted({row.samples for row in rows})
    for column, work in enumerate(works):
        for axes, unit in ((grid[0][column], "memory"), (grid[1][column], "time")):
            plain_axes(axes, LIGHT)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(NullLocator())
            _draw(axes, work, rows, unit, lines)
        grid[0][column].set_title(work.title.replace(", ", ",\n", 1), fontsize=10)
        grid[1][column].set_xlabel("samples of the batch")
    grid[0][0].set_ylabel("peak on the device, MiB")
    grid[1][0].set_ylabel("CPU time, s")
    labels = {way.name: way.title for way in WAYS}
    figure.legend(
        [lines[name] for name in labels if name in lines],
        [labels[name] for name in labels if name in lines],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    return png(figure, dots_per_inch=110)


def _draw(axes: Any, work: Work, rows: Sequence[Any], unit: str, lines: dict[str, Any]) -> None:
    for way in WAYS:
        points = sorted(
            (row.samples, row.device / 2**20 if unit == "memory" else row.seconds)
            for row in rows
            if row.work == work.name and row.way == way.name and way.name in STYLES
        )
        if points:
            colour, marker, dashes, width = STYLES[way.name]
            style = {"color": colour, "marker": marker, "linestyle": dashes, "linewidth": width}
            (lines[way.name],) = axes.plot(*zip(*points, strict=True), markersize=5, **style)
