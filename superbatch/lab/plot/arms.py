"""Styles, curves and rows of the arms in a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from typing import Any

from matplotlib.axes import Axes

from .style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Theme

COLOURS = (BLUE, GREEN, SKY, PURPLE, ORANGE)
WRONG_COLOURS = (VERMILION, ORANGE, PURPLE)
# A study may have more than five arms.
STUDY_COLOURS = (BLUE, GREEN, VERMILION, PURPLE, ORANGE, SKY, "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)))


@dataclass(frozen=True)
class Style:
    """Style of an arm, the same in every panel."""

    colour: str
    marker: str
    dashes: Any
    width: float
    alpha: float = 1.0


def styles_of(claims: Sequence[str], theme: Theme) -> list[Style]:
    """Return a style for each arm: a broad pale real batch, ever narrower splits, so that all are visible."""
    widths = chain((3.0, 2.4, 1.8), repeat(1.3))
    splits = map(Style, cycle(COLOURS), cycle(MARKERS), cycle(DASHES), widths)
    wrong = (Style(colour, "X", (0, (3, 1.5)), 1.6) for colour in cycle(WRONG_COLOURS))
    # "again" is the real batch once more, in its colour.
    real = {
        "real": Style(theme.ink, "o", "solid", 7.0, 0.25),
        "again": Style(theme.ink, "o", (0, (1, 1)), 1.4),
    }
    # Beside exact splits, an arm that is known not to be exact is drawn as a wrong one.
    bad = ("wrong", "other", "inexact") if "exact" in claims else ("wrong", "other")
    return [real.get(claim) or next(wrong if claim in bad else splits) for claim in claims]


def mean_and_range(
    axes: Axes, at: Sequence[float], curves: Sequence[Sequence[float]], style: Style, label: str
) -> list[float]:
    """Draw the mean of the curves, and a faint band from the lowest to the highest; return the means.

    Values that are not finite are left out, and so is a point without a finite value.
    """
    columns = [[value for value in each if math.isfinite(value)] for each in zip(*curves, strict=True)]
    points = [(x, values) for x, values in zip(at, columns, strict=False) if values]
    if not points:
        return []
    xs, means = [x for x, _ in points], [statistics.fmean(values) for _, values in points]
    line = {"color": style.colour, "linewidth": style.width, "linestyle": style.dashes, "alpha": style.alpha}
    axes.plot(xs, means, solid_capstyle="round", label=label, **line)
    if len(curves) > 1:
        low, high = [min(values) for _, values in points], [max(values) for _, values in points]
        # No band down to 0: a logarithmic axis would show it as a block.
        shown = [value > 0 for value in low]
        axes.fill_between(xs, low, high, shown, color=style.colour, alpha=0.08, linewidth=0)
    return means


def runs_by_row(
    axes: Axes,
    arms: Sequence[tuple[str, Sequence[float], Style]],
    theme: Theme,
    *,
    band: tuple[float, float] | None = None,
    log: bool = False,
) -> None:
    """Draw one row per arm: a dot for each run, their mean and standard deviation; shade `band`.

    A logarithmic axis shows the geometric mean without a deviation. A text in the row counts the values that
    are not finite or, on a logarithmic axis, not positive.
    """
    if band is not None:
        axes.axvspan(*band, color=theme.faint, alpha=0.4, linewidth=0)
    rows = rows_for(axes, [name for name, _, _ in arms])
    for y, (_, values, style) in zip(rows, arms, strict=True):
        finite = [value for value in values if math.isfinite(value)]
        drawn = [value for value in finite if value > 0 or not log]
        # Spread over the height of the row, so that equal values are visible.
        spread = [y + 0.5 * (i / max(1, len(drawn) - 1) - 0.5) for i in range(len(drawn))]
        axes.scatter(drawn, spread, s=12, color=style.colour, alpha=0.4, linewidths=0)
        if drawn and len(drawn) == len(finite):  # the mean of the positive values alone would be biased
            sd = statistics.stdev(drawn) if len(drawn) > 1 and not log else None
            mean = statistics.geometric_mean(drawn) if log else statistics.fmean(drawn)
            shape = {"fmt": style.marker, "markersize": 7, "capsize": 4, "linewidth": 1.6}
            axes.errorbar(mean, y, xerr=sd, color=style.colour, **shape)
        missing = [_share(len(finite), len(values), "diverged"), _share(len(drawn), len(finite), "≤ 0")]
        place = {"ha": "right", "va": "bottom", "fontsize": 8, "transform": axes.get_yaxis_transform()}
        if text := ", ".join(filter(None, missing)):
            axes.text(0.98, y + 0.1, text, color=theme.ink, **place)


def _share(part: int, whole: int, rest: str) -> str:
    """Return "N of M REST" for the N = `whole - part` others; "REST" if that is all, "" if none."""
    if part in (0, whole):
        return rest if part < whole else ""
    return f"{whole - part} of {whole} {rest}"


def rows_for(axes: Axes, names: Sequence[str]) -> list[float]:
    """Label one row per arm, the first at the top, and return their y values."""
    rows = [float(-index) for index in range(len(names))]
    axes.set_yticks(rows, names)
    axes.set_ylim((rows[-1] if rows else 0.0) - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    return rows
