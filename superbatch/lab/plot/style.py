"""Elements that all plots share: colours, axes, legends, titles, and the PNG file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with a common colour blindness can distinguish; line styles and
# markers differ too. https://jfly.uni-koeln.de/color/
BLUE, GREEN, SKY, PURPLE, ORANGE, VERMILION = (
    "#0072B2",
    "#009E73",
    "#56B4E9",
    "#CC79A7",
    "#E69F00",
    "#D55E00",
)


@dataclass(frozen=True)
class Theme:
    """Colours of everything but the data."""

    paper: str  # background
    ink: str  # text and lines
    faint: str  # grid, spines and bands


LIGHT = Theme(paper="#ffffff", ink="#1a1a1a", faint="#c9ccd1")
DARK = Theme(paper="#16181d", ink="#e8e8e8", faint="#4a4f59")

DASHED: Any = (0, (4, 2))


def panels(
    height: float, layout: str = "a", *, dark: bool, width: float = 10, **options: Any
) -> tuple[Figure, list[Axes], Theme]:
    """Return a figure and its axes, which `layout` places by letters, such as ``"aa;bc"``, and its theme.

    Sizes are in inches. An empty layout makes no axes.

    Examples:
        >>> figure, axes, theme = panels(4, "aa;bc", dark=True)
        >>> len(axes), theme is DARK
        (3, True)
    """
    theme = DARK if dark else LIGHT
    figure = Figure(figsize=(width, height), facecolor=theme.paper, layout="constrained")
    axes = list(figure.subplot_mosaic(layout, **options).values()) if layout else []
    for each in axes:
        plain_axes(each, theme)
    return figure, axes, theme


def headline(
    figure: Figure, text: str, theme: Theme, *below: str, partial: bool = False, size: int = 12
) -> None:
    """Set the title of a figure, marked if the study was interrupted, and the sentences below it."""
    marked = f"{text} (interrupted: partial)" if partial else text
    figure.suptitle("\n".join([marked, *below]), color=theme.ink, fontsize=size, wrap=True)


def caption(axes: Axes, text: str, theme: Theme, *, wrap: bool = False) -> None:
    """Set the title of one panel, aligned left."""
    axes.set_title(text, fontsize=10, loc="left", color=theme.ink, wrap=wrap)


def empty(axes: Axes, text: str, theme: Theme) -> None:
    """Write into an empty panel why it is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=theme.ink)


def legend(axes: Axes, theme: Theme, **where: Any) -> None:
    """Add a legend without a frame, unless nothing has a label."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, **where)


def legend_below(figure: Figure, axes: Axes, theme: Theme, *, columns: int) -> None:
    """Add the legend of one panel below all panels; inside, it would cover curves."""
    style = {"frameon": False, "labelcolor": theme.ink, "fontsize": 9, "loc": "outside lower center"}
    figure.legend(*axes.get_legend_handles_labels(), ncols=columns, **style)


def line(axes: Axes, points: Iterable[tuple[float, float | None]], *form: str, **style: Any) -> list[float]:
    """Plot the points that have a finite value, unless there are none, and return their values."""
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if known:
        axes.plot(*zip(*known, strict=True), *form, **style)
    return [y for _, y in known]


def png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """Return a figure as the content of a PNG file.

    Examples:
        >>> png(Figure(figsize=(1, 1)))[1:4]
        b'PNG'
    """
    content = BytesIO()
    figure.savefig(content, format="png", dpi=dots_per_inch, facecolor=figure.get_facecolor())
    return content.getvalue()


def plain_axes(axes: Axes, theme: Theme) -> None:
    """Give axes a faint grid behind the data, two spines, and text in the colour of the theme.

    Examples:
        >>> plain_axes(Figure().add_subplot(), LIGHT)
    """
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.faint, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelcolor=theme.ink, which="both")
    axes.spines[["top", "right"]].set_visible(False)  # they carry no scale
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(theme.ink)
