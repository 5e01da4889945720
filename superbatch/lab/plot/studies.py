"""Plots of the studies: one function for each study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.study import Study
from .arms import DASHES, MARKERS, STUDY_COLOURS, Style, mean_and_range, runs_by_row
from .style import BLUE, VERMILION, Theme, headline, legend, line, panels, plain_axes
from .ticks import logarithmic

FAR = 8  # an arm more than this many margins from the reference is outside the axes


def study(report: Study, *, dark: bool = False) -> Figure:
    """Draw a study.

    Examples:
        >>> from superbatch.lab.studies.study import Options, study as run
        >>> figure = study(run("precision", options=Options(runs=1, quick=True)))
        >>> figure.axes[0].get_xlabel()
        'gradients in the sum, K'
    """
    figure, _, theme = panels(5.5, "", dark=dark)
    _DRAWINGS[report.name](figure, report, theme)
    for axes in figure.axes:
        plain_axes(axes, theme)
        axes.title.set_fontsize(10)
    headline(figure, report.question, theme, report.conclusion, partial=report.partial, size=11)
    return figure


def _momentum(figure: Figure, report: Study, theme: Theme) -> None:
    metric, noise = figure.subplots(1, 2, sharey=True)
    excess, theory = "noise excess", "lr/(B(1-m)), relative"
    _dots(metric, report, report.quantities[0].name, theme)
    _dots(noise, report, excess, theme, log=True, missing_value=math.nan)
    found = [value for value in report.arms[0].values(excess) if math.isfinite(value)]
    first = statistics.fmean(found) if found else 0.0
    for row, arm in enumerate(report.arms):
        expected = arm.mean(theory)
        if first > 0 and expected is not None:
            noise.vlines(first * expected, -row - 0.4, -row + 0.4, color=theme.ink, linewidth=1.2)
    noise.set_xlabel("noise excess of the training loss")
    noise.set_title("Runs, mean; bar: from A by lr / (batch (1 - m))")


def _grow_batch(figure: Figure, report: Study, theme: Theme) -> None:
    samples, updates = figure.subplots(1, 2, sharey=True)
    _curves(samples, report, [report.curve_at] * len(report.arms), theme)
    _curves(updates, report, [arm.curve_updates for arm in report.arms], theme)
    loss = "training loss, mean over seeds; band: range"
    samples.set(xlabel="samples seen", ylabel=loss, title="Against samples")
    updates.set(xlabel="updates made", title="Against updates")


def _critical_batch(figure: Figure, report: Study, theme: Theme) -> None:
    loss, needed = figure.subplots(1, 2)
    _curves(loss, report, [report.curve_at] * len(report.arms), theme)
    loss.set(xlabel="samples since the checkpoint", ylabel="smoothed training loss, mean over seeds")
    loss.set_title("Branches of one checkpoint: the same samples in the same order")
    batches = [float(arm.name.rpartition(" ")[2]) for arm in report.arms]  # an arm is "batch 64"
    factors = [arm.values("samples needed, x") for arm in report.arms]
    for batch, values in zip(batches, factors, strict=True):
        finite = [value for value in values if math.isfinite(value)]
        needed.scatter([batch] * len(finite), finite, s=12, color=BLUE, alpha=0.35, linewidths=0)
    medians = [statistics.median(values) if values else None for values in factors]
    label = "measured: each dot a seed, the line their median"
    line(needed, zip(batches, medians, strict=True), "o-", color=BLUE, label=label)
    predicted = [arm.facts.get("by the noise scale, x") for arm in report.arms]
    label = "predicted by the noise scale at the checkpoint, of all seeds"
    line(needed, zip(batches, predicted, strict=True), "D-", color=VERMILION, label=label)
    logarithmic(needed.xaxis, base=2)
    needed.set(xlabel="batch", ylabel="samples needed, relative to the smallest batch")
    needed.set_title("Samples needed by larger batches")
    legend(needed, theme)


def _curves(
    axes: Axes, report: Study, at: Sequence[Sequence[float]], theme: Theme, **legend_place: Any
) -> None:
    """Draw the mean curve of each arm over its x values, with the range over the runs."""
    for index, (arm, xs) in enumerate(zip(report.arms, at, strict=True)):
        mean_and_range(axes, xs, [run.curve for run in arm.runs], _style(index), arm.name)
    logarithmic(axes.yaxis)
    legend(axes, theme, handlelength=3.4, **legend_place)


def _style(index: int) -> Style:
    return Style(STUDY_COLOURS[index % 7], MARKERS[index % 7], DASHES[index % 5], 2.2)


def _precision(figure: Figure, report: Study, theme: Theme) -> None:
    axes = figure.add_subplot()
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    _curves(axes, report, [report.curve_at] * len(report.arms), theme, **place)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report.curve_at, [f"{count:g}" for count in report.curve_at])
    axes.set(xlabel="gradients in the sum, K", ylabel="relative error of the sum")


def _survey(figure: Figure, report: Study, theme: Theme) -> None:
    curves, rates = figure.subplots(1, 2, gridspec_kw={"width_ratios": (3, 2)})
    _curves(curves, report, [report.curve_at] * len(report.arms), theme)
    logarithmic(curves.xaxis)
    curves.set(xlabel="value surveyed", ylabel="smoothed training loss, mean over surveys")
    curves.set_title("Band: range over surveys")
    _dots(rates, report, report.quantities[0].name, theme, log=True)
    rates.set_title("Suggestion of each survey")


def _splits(figure: Figure, report: Study, theme: Theme) -> None:
    metric, apart = figure.subplots(1, 2)
    _dots(metric, report, report.quantities[0].name, theme)
    _dots(apart, report, "weights differ by", theme, log=True)
    apart.set_title("Weights at the end, against the real batch of the same seed")


def _coupled(figure: Figure, report: Study, theme: Theme) -> None:
    measures = [each.name for each in report.quantities if not each.name.startswith(("learning", "strength"))]
    panels = figure.subplots(1, 2 if len(measures) > 1 else 1, squeeze=False)[0]
    if report.curve_at and len(panels) > 1:
        _outlines(panels[-1], report)
        panels = panels[:-1]
    for axes, quantity in zip(panels, measures, strict=False):
        _dots(axes, report, quantity, theme, cut=False)


def _outlines(axes: Axes, report: Study) -> None:
    """Draw one closed line per arm: the mean radius over the seeds at the angles of `Study.curve_at`."""
    for index, arm in enumerate(report.arms):
        radii = [statistics.fmean(each) for each in zip(*(run.curve for run in arm.runs), strict=True)]
        points = [(r * math.cos(at), r * math.sin(at)) for at, r in zip(report.curve_at, radii, strict=False)]
        style = _style(index)
        line(axes, [*points, *points[:1]], color=style.colour, linestyle=style.dashes, linewidth=2.0)
    axes.set_aspect("equal")
    axes.set_title("Outline of the generated points, in the rows' colours")


def _dots(
    axes: Axes,
    report: Study,
    quantity: str,
    theme: Theme,
    *,
    log: bool = False,
    cut: bool = True,
    missing_value: float | None = None,
) -> None:
    """Draw one row per arm: each run a dot, mean and sd; the margin of the tests as a band.

    `cut` limits the axis around the reference. `missing_value` is the value of a run that lacks the
    quantity; without it the run is left out.
    """
    names = [f"{arm.name}: {fill(arm.how, 34)}" if len(arm.name) == 1 else arm.name for arm in report.arms]
    values = [[run.values.get(quantity, missing_value) for run in arm.runs] for arm in report.arms]
    runs = [[value for value in each if value is not None] for each in values]
    styles = map(_style, range(len(names)))
    tests = [test for test in report.tests if test.quantity == quantity and not test.ratio and not log]
    middle = report.arm(tests[0].second).mean(quantity) if tests else None
    margin = tests[0].margin if tests and middle is not None and math.isfinite(middle) else None
    band = None if middle is None or margin is None else (middle - margin, middle + margin)
    runs_by_row(axes, list(zip(names, runs, styles, strict=True)), theme, band=band, log=log)
    if middle is not None and margin is not None:
        axes.set_title(f"Mean ± sd, runs as dots; band: ±{margin:g} around {tests[0].second}")
        if cut:
            # A margin far below the scatter of the reference's own runs must not hide them.
            scatter = [abs(each - middle) for each in report.arm(tests[0].second).values(quantity)]
            most = max([FAR * margin, *(2 * each for each in scatter if math.isfinite(each))])
            _cut(axes, report, quantity, middle, most, theme)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(quantity)
    if log:
        logarithmic(axes.xaxis)


def _cut(axes: Axes, report: Study, quantity: str, middle: float, most: float, theme: Theme) -> None:
    """Limit the axis to values near `middle`; an arrow names each mean outside.

    One arm that failed would make all others indistinguishable.
    """
    near = [each for arm in report.arms for each in arm.values(quantity) if abs(each - middle) <= most]
    near = near or [middle]
    pad = 0.05 * (max(near) - min(near) + most)
    axes.set_xlim(min(near) - pad, max(near) + pad)
    for index, arm in enumerate(report.arms):
        mean = arm.mean(quantity)
        if mean is None or not math.isfinite(mean) or abs(mean - middle) <= most:
            continue
        left = mean < middle
        arrow = f"← {mean:.3g}" if left else f"{mean:.3g} →"
        style = {"ha": "left" if left else "right", "va": "center", "color": theme.ink, "fontsize": 9}
        axes.text(0.02 if left else 0.98, -index, arrow, transform=axes.get_yaxis_transform(), **style)


_DRAWINGS: Mapping[str, Callable[[Figure, Study, Theme], None]] = {
    "momentum": _momentum,
    "grow-batch": _grow_batch,
    "critical-batch": _critical_batch,
    "survey": _survey,
    "precision": _precision,
    "splits": _splits,
    "coupled": _coupled,
}
