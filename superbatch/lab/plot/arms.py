"""Arms of a study in a plot: their styles, their curves and their rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from .style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, Theme

COLOURS = (BLUE, GREEN, SKY, PURPLE, ORANGE)
WRONG_COLOURS = (VERMILION, ORANGE, PURPLE)
# Of the arms of a study, which may be more than five.
STUDY_COLOURS = (BLUE, GREEN, VERMILION, PURPLE, ORANGE, SKY, "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)))


@dataclass(frozen=True)
class Style:
    """Style of an arm in every panel."""

    colour: str
    marker: str
    dashes: Any
    width: float
    alpha: float = 1.0


def styles_of(claims: Sequence[str], theme: Theme) -> list[Style]:
    """The real batch is a broad pale line under the others; each split is narrower than the one before."""
    styles: list[Style] = []
    splits = wrong = 0
    # Beside exact splits those that are known not to be exact are the wrong ones.
    bad = ("wrong", "other", "inexact") if "exact" in claims else ("wrong", "other")
    for claim in claims:
        if claim == "real":
            styles.append(Style(theme.ink, "o", "solid", 7.0, 0.25))
        elif claim == "again":
            styles.append(Style(theme.ink, "o", (0, (1, 1)), 1.4))  # the same batch: the same colour
        elif claim in bad:
            styles.append(Style(WRONG_COLOURS[wrong % 3], "X", (0, (3, 1.5)), 1.6))
            wrong += 1
        else:
            k = splits % len(COLOURS)
            styles.append(Style(COLOURS[k], MARKERS[k], DASHES[k], max(1.3, 3.0 - 0.6 * splits)))
            splits += 1
    return styles


def mean_and_range(
    axes: Axes, at: Sequence[float], curves: Sequence[Sequence[float]], style: Style, label: str
) -> list[float]:
    """Draw the mean of curves and, faint, from the lowest to the highest; return the means.

    Values that are not finite are left out, and points where no value is.
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
        axes.fill_between(xs, low, high, color=style.colour, alpha=0.08, linewidth=0)
    return means


def dots(axes: Axes, values: Sequence[float], row: float, colour: str, *, upright: bool = False) -> None:
    """Draw one dot for each run, spread over the row so that equal ones are seen."""
    spread = [row + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
    axes.scatter(
        *((spread, values) if upright else (values, spread)), s=12, color=colour, alpha=0.4, linewidths=0
    )


def runs_by_row(
    axes: Axes,
    arms: Sequence[tuple[str, Sequence[float], Style]],
    theme: Theme,
    *,
    band: tuple[float, float] | None = None,
    log: bool = False,
) -> None:
    """One row per arm: each run a dot, mean and standard deviation; the margin of a test as a band.

    Values that are not finite are left out. On a logarithmic axis the mean is geometric, without deviation.
    """
    if band is not None:
        axes.axvspan(*band, color=theme.faint, alpha=0.4, linewidth=0)
    rows = rows_for(axes, [name for name, _, _ in arms])
    for y, (_, values, style) in zip(rows, arms, strict=True):
        known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        if known:
            dots(axes, known, y, style.colour)
            sd = statistics.stdev(known) if len(known) > 1 and not log else None
            mean = statistics.geometric_mean(known) if log else statistics.fmean(known)
            shape = {"fmt": style.marker, "markersize": 7, "capsize": 4, "linewidth": 1.6}
            axes.errorbar(mean, y, xerr=sd, color=style.colour, **shape)


def rows_for(axes: Axes, names: Sequence[str]) -> list[float]:
    """One row per arm, the first on top."""
    rows = [float(-index) for index in range(len(names))]
    axes.set_yticks(rows, names)
    axes.set_ylim((rows[-1] if rows else 0.0) - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    return rows
