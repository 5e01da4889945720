"""Plot of a comparison of splits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.comparison import Comparison
from ..report.table import margin_text
from .arms import Style, mean_and_range, runs_by_row, styles_of
from .style import Theme, empty, headline, legend, panels
from .ticks import logarithmic

NOTHING = "no run was finished"
ZERO = 1e-19  # place of zero on the logarithmic axis of the differences


def comparison(report: Comparison, *, dark: bool = False) -> Figure:
    """Draw a comparison: training loss, metric with its margin, and differences of the weights.

    Examples:
        >>> from superbatch.lab.studies.compare import Options, compare
        >>> figure = comparison(compare("digits", Options(splits="5x20", updates=3, runs=2)))
        >>> [axes.get_xlabel() for axes in figure.axes][:2]
        ['updates (each of 100 samples)', 'test accuracy, %']
    """
    rows = 1.6 + 0.42 * len(report.arms)
    ratios = (5.0, rows)
    figure, (curves, metric, weights), theme = panels(5.3 + rows, "aa;bc", dark=dark, height_ratios=ratios)
    styles = styles_of([arm.claim for arm in report.arms], theme)
    _draw_curves(curves, report, styles, theme)
    _draw_metric(metric, report, styles, theme)
    _draw_differences(weights, report, styles, theme)
    headline(figure, f"{report.trained}: {report.description}", theme, partial=report.partial)
    return figure


def _draw_curves(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    drawn = False
    for arm, style in zip(report.arms, styles, strict=True):
        label = f"{arm.name} (real batch)" if arm.claim == "real" else arm.name
        curves = [run.losses for run in arm.runs]
        drawn |= bool(mean_and_range(axes, report.curve_updates, curves, style, label))
    axes.set(xlabel=f"updates (each of {report.batch_size} samples)", ylabel="training loss, mean over runs")
    title = "Same weights at the start, same samples, same updates: band = range over runs"
    axes.set_title(title, fontsize=10)
    if not drawn:
        empty(axes, NOTHING, theme)
        return
    logarithmic(axes.yaxis)
    legend(axes, theme, handlelength=3.4)


def _draw_metric(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    names = [arm.name.replace(" ", "\n", 1) for arm in report.arms]
    runs = [[run.metric for run in arm.runs] for arm in report.arms]
    real = report.arms[0].mean
    band = None if real is None or not math.isfinite(real) else (real - report.margin, real + report.margin)
    runs_by_row(axes, list(zip(names, runs, styles, strict=True)), theme, band=band)
    if band is None:
        empty(axes, NOTHING, theme)
    axes.set_xlabel(f"{report.metric}, {report.unit}" if report.unit else report.metric)
    axes.set_title(f"Mean ± sd, runs as dots; band: {margin_text(report)}", fontsize=10)


def _draw_differences(axes: Axes, report: Comparison, styles: Sequence[Style], theme: Theme) -> None:
    found = [[run.weight_difference for run in arm.runs] for arm in report.arms]
    clipped = [[max(each, ZERO) for each in differences if each is not None] for differences in found]
    names = [""] * len(report.arms)  # the panel of the metric, on the left, has the names
    axes.set_xscale("log")
    rows = list(zip(names, clipped, styles, strict=True))
    runs_by_row(axes, rows, theme, band=(ZERO / 3, report.tolerance), log=True)
    axes.set_xlim(ZERO / 3, 10)
    ticks = (1e-16, 1e-12, 1e-8, 1e-4, 1.0)
    axes.set_xticks([ZERO, *ticks], ["0", *(f"$10^{{{round(math.log10(tick))}}}$" for tick in ticks)])
    axes.minorticks_off()
    axes.set_xlabel("difference from the first row, $|w - w_\\mathrm{real}| / |w_\\mathrm{real}|$")
    axes.set_title(f"Weights at the end, runs as dots; band: rounding in {report.dtype}", fontsize=10)
