"""Plot of a fit: peak memory and time per sample against the size of the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superbatch.results.memory import binary_text

from ..report.fitting import Fitting
from ..report.fitting_text import findings, title_of
from ..report.table import seconds_text
from .style import BLUE, DASHED, GREEN, VERMILION, Theme, caption, empty, headline, legend_below, line, panels
from .ticks import logarithmic

FAR_ABOVE = 8  # a limit above this many times the largest peak is not drawn: the curve would look flat


def fitting(report: Fitting, *, dark: bool = False) -> Figure:
    """Draw a fit: the predicted and measured peaks with the limit; below them the time per sample.

    Examples:
        >>> from superbatch.lab.studies.fit import Options, fit
        >>> figure = fitting(fit("digits", Options(seconds=1)))
        >>> figure.axes[1].get_xlabel()
        'samples of a micro-batch'
    """
    figure, (memory, speed), theme = panels(8, "a;b", dark=dark, sharex=True, height_ratios=(5, 4))
    for axes in (memory, speed):
        axes.set_xscale("log", base=2)
        _choice(axes, report, theme)
    _memory(memory, report, theme)
    _speed(speed, report, theme)
    legend_below(figure, memory, theme, columns=3)
    headline(figure, title_of(report), theme, findings(report)[0], partial=report.partial)
    return figure


def _memory(axes: Axes, report: Fitting, theme: Theme) -> None:
    predicted = [(size.samples, size.predicted) for size in report.sizes]
    measured = [(size.samples, size.measured) for size in report.sizes]
    circles = {"color": theme.ink, "markersize": 7, "fillstyle": "none", "label": "measured"}
    peaks = line(axes, predicted, color=BLUE, linewidth=2, label="predicted")
    peaks += line(axes, measured, "o", **circles)
    logarithmic(axes.yaxis, lambda value: binary_text(round(value)), base=2)
    _limit(axes, report, peaks)
    axes.set_ylabel("peak memory")
    caption(axes, "Memory beyond the model: gradients, optimizer state, activations", theme)


def _limit(axes: Axes, report: Fitting, peaks: Sequence[float]) -> None:
    """Draw the limit and shade the area above; a limit far above the peaks is in the legend only."""
    if not peaks:
        return
    limit, low, high = report.usable, min(peaks) / 1.5, max(peaks) * 1.8
    if limit <= FAR_ABOVE * max(peaks):
        low, high = min(low, limit / 2), max(high, limit * 2.2)
    axes.axhspan(limit, max(high, limit), color=VERMILION, alpha=0.12, linewidth=0)
    axes.axhline(limit, color=VERMILION, linewidth=1.6, label=f"limit: {report.limit}")
    axes.set_ylim(low, high)


def _speed(axes: Axes, report: Fitting, theme: Theme) -> None:
    timed = [size for size in report.sizes if size.seconds is not None]
    axes.set(xlabel="samples of a micro-batch", ylabel="time per sample")
    caption(axes, "Forward and backward; band: lower to upper quartile of the windows", theme)
    samples = [size.samples for size in report.sizes]
    axes.set_xticks(samples, [str(each) for each in samples])
    axes.tick_params(axis="x", which="minor", bottom=False)  # the sizes have ticks of their own
    if not timed:
        empty(axes, "nothing was timed", theme)
        return
    samples = [size.samples for size in timed]
    seconds = [size.seconds or 0.0 for size in timed]
    slow = [size.high or 0.0 for size in timed]
    axes.fill_between(samples, seconds, slow, color=GREEN, alpha=0.2, linewidth=0)
    axes.plot(samples, seconds, "o-", color=GREEN, linewidth=2, markersize=6)
    logarithmic(axes.yaxis, seconds_text)


def _choice(axes: Axes, report: Fitting, theme: Theme) -> None:
    """Draw lines at the fastest and the largest size that fits."""
    marks = {} if report.refused is not None else {"fastest": (report.fastest, GREEN)}
    largest = max((size.samples for size in report.sizes if size.fits), default=None)
    for name, (samples, colour) in {**marks, "largest that fits": (largest, theme.ink)}.items():
        if samples is not None:
            axes.axvline(samples, color=colour, linewidth=1.2, linestyle=DASHED, label=f"{name}: {samples}")
