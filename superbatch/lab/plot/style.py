"""Elements common to all plots: colours, plain axes, and saving a figure to a file."""

# matplotlib leaves the types of its keyword arguments open:
# pyright: standard

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

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


def png(figure: Figure, *, dots_per_inch: int = 150) -> bytes:
    """Render a figure.

    Args:
        figure: any.
        dots_per_inch: resolution.

    Returns:
        A PNG file's content.

    Examples:
        >>> png(Figure(figsize=(1, 1)))[1:4]
        b'PNG'
    """
    content = BytesIO()
    figure.savefig(content, format="png", dpi=dots_per_inch, facecolor=figure.get_facecolor())
    return content.getvalue()


def plain_axes(axes: Axes, theme: Theme) -> None:
    """A faint grid behind the data, two spines, and text in the theme's ink.

    Args:
        axes: to be drawn into.
        theme: the colours.

    Examples:
        >>> plain_axes(Figure().add_subplot(), LIGHT)
    """
    axes.set_facecolor(theme.paper)
    axes.grid(color=theme.faint, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelcolor=theme.ink, which="both")
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(theme.faint)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    axes.title.set_color(theme.ink)
