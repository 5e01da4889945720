"""The picture of an advice: time to the same loss against the accumulation steps."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superbatch.results.advice import Advice

from ..report.advice_text import range_said, title_of, verdict_text
from .style import BLUE, DASHED, GREEN, VERMILION, Theme, caption, hatched, headline, legend_below, panels
from .ticks import logarithmic

COLOURS = {"helps": GREEN, "wasteful": VERMILION, "undetermined": BLUE}
HARDLY = 0.05


def advice(report: Advice, *, dark: bool = False) -> Figure:
    """Draw an advice: W(K)/W(1) with its range, the best K, and the samples that a larger batch needs.

    Examples:
        >>> from superbatch.tuning.advice import Times, advise
        >>> figure = advice(advise(microbatch_size=8, accumulation_steps=4, noise=100.0,
        ...     times=Times(microbatch=0.1, update=0.01)))
        >>> figure.axes[0].get_xlabel()
        'accumulation steps K (batch = K x 8 samples)'
    """
    figure, (axes,), theme = panels(6, dark=dark)
    axes.set_xscale("log", base=2)
    logarithmic(axes.yaxis, base=2)
    _curves(axes, report, theme)
    _marks(axes, report, theme)
    steps = [each.accumulation_steps for each in report.steps]
    axes.set_xticks(steps, [str(each) for each in steps])
    axes.minorticks_off()  # they would lie between the steps that were asked about
    axes.set_xlabel(f"accumulation steps K (batch = K x {report.microbatch_size * report.ranks} samples)")
    axes.set_ylabel("relative to K = 1, to the same loss")
    legend_below(figure, axes, theme, columns=3)
    caption(axes, title_of(report), theme, wrap=True)
    headline(figure, verdict_text(report).split(". ")[0] + ".", theme, partial=report.partial, size=13)
    return figure


def _curves(axes: Axes, report: Advice, theme: Theme) -> None:
    colour = COLOURS[report.verdict]
    steps = [each.accumulation_steps for each in report.steps]
    low, high = [each.low for each in report.steps], [each.high for each in report.steps]
    axes.fill_between(
        steps, low, high, color=colour, alpha=0.18, linewidth=0, label=f"range: {range_said(report)}"
    )
    bands = [each.band for each in report.steps]
    if report.models and all(bands):
        powers = ", ".join(str(each.power) for each in report.models if each.noise is not None)
        hatched(axes, list(zip(steps, bands, strict=True)), colour, f"band of Adam's models, q = {powers}")
    times = [(each.accumulation_steps, each.time) for each in report.steps if each.time is not None]
    samples = [(each.accumulation_steps, each.samples) for each in report.steps if each.samples is not None]
    if times:
        axes.plot(*zip(*times, strict=True), "o-", color=colour, linewidth=2.2, markersize=6, label="time")
    if samples:
        style = {"color": theme.ink, "linewidth": 1.4, "linestyle": DASHED, "alpha": 0.7}
        axes.plot(*zip(*samples, strict=True), label="samples needed", **style)


def _marks(axes: Axes, report: Advice, theme: Theme) -> None:
    axes.axhspan(1 - HARDLY, 1 + HARDLY, color=theme.faint, alpha=0.6, linewidth=0)  # hardly a difference
    asked = f"in question: K = {report.asked}"
    axes.axvline(report.asked, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 2)), label=asked)
    if report.best is not None and 1 < report.best <= report.steps[-1].accumulation_steps:
        best = f"best: K* = {report.best:.3g}"
        axes.axvline(report.best, color=COLOURS[report.verdict], linewidth=1.2, label=best)
