"""The picture of a comparison of splits."""

# matplotlib leaves the types of its keyword arguments open:
# pyright: standard

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from ..report.comparison import Arm, Comparison
from ..report.table import margin_text
from .style import BLUE, DARK, GREEN, LIGHT, ORANGE, PURPLE, SKY, VERMILION, Theme, plain_axes
from .ticks import readable

SPLIT_COLOURS = (BLUE, GREEN, SKY, PURPLE, ORANGE)
WRONG_COLOURS = (VERMILION, ORANGE, PURPLE)
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("solid", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)))
ZERO = 1e-19
"""Where a difference of exactly zero is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Style:
    """Style of an arm in every panel."""

    colour: str
    marker: str
    dashes: Any
    width: float


def comparison(report: Comparison, *, dark: bool = False) -> Figure:
    """Draw a comparison: training loss over updates, the metric with its margin, the weights' differences.

    Args:
        report: of a comparison, whole or partial.
        dark: light on dark instead of dark on light.

    Returns:
        A figure, 10 inches wide; save it with `png` or ``figure.savefig``.

    Examples:
        >>> from superbatch.lab.studies.compare import Options, compare
        >>> figure = comparison(compare("digits", Options(splits="5x20", updates=3, runs=2)))
        >>> [axes.get_xlabel() for axes in figure.axes][:2]
        ['updates (each of 100 samples)', 'test accuracy, %']
    """
    theme = DARK if dark else LIGHT
    styles = _styles(report.arms, theme)
    height = 5.6 + 0.42 * len(report.arms) + 1.3
    figure = Figure(figsize=(10, height), facecolor=theme.paper, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(5.0, 1.6 + 0.42 * len(report.arms)))
    curves = figure.add_subplot(grid[0, :])
    metric = figure.add_subplot(grid[1, 0])
    weights = figure.add_subplot(grid[1, 1])
    for axes in (curves, metric, weights):
        plain_axes(axes, theme)
    _draw_curves(curves, report, styles, theme)
    _draw_metric(metric, report, styles, theme)
    _draw_differences(weights, report, styles, theme)
    partial = " (interrupted: partial)" if report.partial else ""
    figure.suptitle(
        f"{report.trained}: {report.description}{partial}", color=theme.ink, fontsize=12, wrap=True
    )
    return figure


def _styles(arms: Sequence[Arm], theme: Theme) -> list[Style]:
    """The real batch is a broad pale line under the others; each split is narrower than the one before."""
    styles: list[Style] = []
    splits = wrong = 0
    beside = any(arm.claim == "exact" for arm in arms)
    for arm in arms:
        if arm.claim == "real":
            styles.append(Style(theme.ink, "o", "solid", 7.0))
        elif arm.claim == "wrong" or (arm.claim == "inexact" and beside):
            styles.append(Style(WRONG_COLOURS[wrong % 3], "X", (0, (3, 1.5)), 1.6))
            wrong += 1
        else:
            k = splits % len(SPLIT_COLOURS)
            styles.append(Style(SPLIT_COLOURS[k], MARKERS[k], DASHES[k], max(1.2, 3.2 - 0.7 * splits)))
            splits += 1
    return styles


def _draw_curves(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    drawn = False
    for arm, style in zip(report.arms, styles, strict=True):
        curves = list(zip(*(run.losses for run in arm.runs), strict=True))
        points = [(u, [v for v in at if math.isfinite(v)]) for u, at in zip(report.curve_updates, curves)]  # noqa: B905  (without runs there is no curve)
        points = [(update, values) for update, values in points if values]
        if not points:
            continue
        drawn = True
        updates = [update for update, _ in points]
        means = [statistics.fmean(values) for _, values in points]
        real = arm.claim == "real"
        axes.plot(
            updates,
            means,
            color=style.colour,
            linewidth=style.width,
            linestyle=style.dashes,
            alpha=0.25 if real else 1.0,
            solid_capstyle="round",
            label=f"{arm.name} (real batch)" if real else arm.name,
        )
        if len(arm.runs) > 1:
            low, high = [min(values) for _, values in points], [max(values) for _, values in points]
            axes.fill_between(updates, low, high, color=style.colour, alpha=0.07, linewidth=0)
    axes.set_xlabel(f"updates (each of {report.batch_size} samples)")
    axes.set_ylabel("training loss, mean over runs")
    axes.set_title(
        "Same weights at the start, same samples, same updates: band = range over runs", fontsize=10
    )
    if not drawn:
        _nothing(axes, theme)
        return
    axes.set_yscale("log")
    readable(axes.yaxis)
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, handlelength=3.4)


def _draw_metric(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    rows = _rows(axes, report, labels=True)
    real = report.arms[0].mean
    if real is None or not math.isfinite(real):
        _nothing(axes, theme)
    else:
        axes.axvspan(real - report.margin, real + report.margin, color=theme.faint, alpha=0.4, linewidth=0)
        axes.axvline(real, color=theme.ink, linewidth=0.8, alpha=0.6)
    for arm, style, y in zip(report.arms, styles, rows, strict=True):
        seeds = [run.metric for run in arm.runs if math.isfinite(run.metric)]
        spread = [y + 0.5 * (i / max(1, len(seeds) - 1) - 0.5) for i in range(len(seeds))]
        axes.scatter(seeds, spread, s=11, color=style.colour, alpha=0.4, linewidths=0)
        if arm.mean is not None and math.isfinite(arm.mean):
            axes.errorbar(
                arm.mean,
                y,
                xerr=arm.sd,
                fmt=style.marker,
                color=style.colour,
                markersize=7,
                capsize=4,
                linewidth=1.6,
            )
    unit = f", {report.unit}" if report.unit else ""
    axes.set_xlabel(f"{report.metric}{unit}")
    axes.set_title(f"Mean ± sd, runs as dots; band: {margin_text(report)}", fontsize=10)


def _draw_differences(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    rows = _rows(axes, report, labels=False)
    axes.set_xscale("log")
    axes.set_xlim(ZERO / 3, 10)
    axes.axvspan(ZERO / 3, report.tolerance, color=theme.faint, alpha=0.4, linewidth=0)
    for arm, style, y in zip(report.arms, styles, rows, strict=True):
        found = [run.weight_difference for run in arm.runs if run.weight_difference is not None]
        clipped = [min(max(value, ZERO), 9.0) for value in found]
        axes.scatter(clipped, [y] * len(clipped), marker=style.marker, s=42, color=style.colour, alpha=0.55)
        if arm.claim == "real":
            where = blended_transform_factory(axes.transAxes, axes.transData)
            axes.text(
                0.98, y, "reference", transform=where, va="center", ha="right", fontsize=9, color=theme.ink
            )
    ticks = (1e-16, 1e-12, 1e-8, 1e-4, 1.0)
    axes.set_xticks([ZERO, *ticks], ["0", *(f"$10^{{{round(math.log10(tick))}}}$" for tick in ticks)])
    axes.minorticks_off()
    axes.set_xlabel("relative difference of the weights, $|w - w_\\mathrm{real}| / |w_\\mathrm{real}|$")
    axes.set_title(f"Weights at the end, each run; band: rounding in {report.dtype}", fontsize=10)


def _rows(axes: Axes, report: Comparison, *, labels: bool) -> list[float]:
    """One row per arm, the first on top."""
    rows = [float(-i) for i in range(len(report.arms))]
    axes.set_yticks(
        rows, [arm.name.replace(" ", "\n", 1) for arm in report.arms] if labels else [""] * len(rows)
    )
    axes.set_ylim(rows[-1] - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    return rows


def _nothing(axes: Axes, theme: Theme) -> None:
    axes.text(0.5, 0.5, "no run was finished", transform=axes.transAxes, ha="center", color=theme.ink)
