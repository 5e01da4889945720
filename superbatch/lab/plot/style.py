"""Elements common to all plots: colours, plain axes, and saving a figure to a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any common colour blindness tell apart; line style and marker say
# the same once more. https://jfly.uni-koeln.de/color/
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
    """Colours of everything that is not data."""

    paper: str
    ink: str
    faint: str


LIGHT = Theme(paper="#ffffff", ink="#1a1a1a", faint="#c9ccd1")
DARK = Theme(paper="#16181d", ink="#e8e8e8", faint="#4a4f59")

DASHED: Any = (0, (4, 2))


def blank(height: float, *, dark: bool, width: float = 10) -> tuple[Figure, Theme]:
    """An empty figure on the ground of its theme; sizes in inches."""
    theme = DARK if dark else LIGHT
    return Figure(figsize=(width, height), facecolor=theme.paper, layout="constrained"), theme


def panels(
    height: float, layout: str = "a", *, dark: bool, width: float = 10, **options: Any
) -> tuple[Figure, list[Axes], Theme]:
    """A figure and its axes in the order of their letters; `layout` draws where each lies, as ``"aa;bc"``.

    Examples:
        >>> figure, axes, theme = panels(4, "aa;bc", dark=True)
        >>> len(axes), theme is DARK
        (3, True)
    """
    figure, theme = blank(height, dark=dark, width=width)
    axes = list(figure.subplot_mosaic(layout, **options).values())
    for each in axes:
        plain_axes(each, theme)
    return figure, axes, theme


def headline(
    figure: Figure, text: str, theme: Theme, *below: str, partial: bool = False, size: int = 12
) -> None:
    """The title of a figure, which says if the study was interrupted, and sentences below it."""
    marked = f"{text} (interrupted: partial)" if partial else text
    figure.suptitle("\n".join([marked, *below]), color=theme.ink, fontsize=size, wrap=True)


def caption(axes: Axes, text: str, theme: Theme, *, wrap: bool = False) -> None:
    """The title of one panel, at its left end."""
    axes.set_title(text, fontsize=10, loc="left", color=theme.ink, wrap=wrap)


def empty(axes: Axes, text: str, theme: Theme) -> None:
    """Say in an empty panel why it is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=theme.ink)


def legend(axes: Axes, theme: Theme, **where: Any) -> None:
    """A legend without a frame; none where nothing was drawn that has a name."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, **where)


def legend_below(figure: Figure, axes: Axes, theme: Theme, *, columns: int) -> None:
    """A legend of one panel below all of them: inside, it would lie on curves or lines."""
    style = {"frameon": False, "labelcolor": theme.ink, "fontsize": 9, "loc": "outside lower center"}
    figure.legend(*axes.get_legend_handles_labels(), ncols=columns, **style)


def hatched(
    axes: Axes, bands: Sequence[tuple[float, tuple[float, float] | None]], colour: str, label: str
) -> None:
    """A hatched band from place to place, with gaps where it is None; nothing without any."""
    if not any(band for _, band in bands):
        return
    gap = (math.nan, math.nan)
    low, high = ([(band or gap)[end] for _, band in bands] for end in (0, 1))
    style = {"facecolor": "none", "hatch": "///", "alpha": 0.5, "linewidth": 0, "label": label}
    axes.fill_between([x for x, _ in bands], low, high, edgecolor=colour, **style)


def png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """Render a figure as the content of a PNG file.

    Examples:
        >>> png(Figure(figsize=(1, 1)))[1:4]
        b'PNG'
    """
    content = BytesIO()
    figure.savefig(content, format="png", dpi=dots_per_inch, facecolor=figure.get_facecolor())
    return content.getvalue()


def plain_axes(axes: Axes, theme: Theme) -> None:
    """A faint grid behind the data, two spines, and text in the theme's ink.

    Examples:
        >>> plain_axes(Figure().add_subplot(), LIGHT)
    """
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.faint, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)  # the grid is behind the data
    axes.tick_params(colors=theme.ink, labelcolor=theme.ink, which="both")
    axes.spines[["top", "right"]].set_visible(False)  # a frame on four sides says nothing more
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(theme.ink)
