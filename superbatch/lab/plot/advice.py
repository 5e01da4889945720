"""Plot of an advice: time to the same loss against the accumulation steps."""

from __future__ import annotations

from matplotlib.figure import Figure

from superbatch.results.advice import Advice

from ..report.advice_text import noise_range_text, title_of, verdict_text
from .noise import times_against_k
from .style import BLUE, DASHED, GREEN, VERMILION, caption, headline, legend_below, line, panels

COLOURS = {"helps": GREEN, "wasteful": VERMILION, "undetermined": BLUE}
HARDLY = 0.05  # a relative difference that nobody would notice


def advice(report: Advice, *, dark: bool = False) -> Figure:
    """Draw an `Advice`: W(K)/W(1) with its range, the best K, and the samples that a larger batch needs.

    Examples:
        >>> from superbatch.tuning.advice import Times, advise
        >>> figure = advice(advise(microbatch_size=8, accumulation_steps=4, noise=100.0,
        ...     times=Times(microbatch=0.1, update=0.01)))
        >>> figure.axes[0].get_xlabel()
        'accumulation steps K (batch = K x 8 samples)'
    """
    figure, (axes,), theme = panels(6, dark=dark)
    colour = COLOURS[report.verdict]
    times_against_k(axes, report.steps, colour, range_of=noise_range_text(report))
    samples = [(each.accumulation_steps, each.samples) for each in report.steps]
    style = {"color": theme.ink, "linewidth": 1.4, "linestyle": DASHED, "alpha": 0.7}
    line(axes, samples, label="samples needed", **style)
    axes.axhspan(1 - HARDLY, 1 + HARDLY, color=theme.faint, alpha=0.6, linewidth=0)
    asked = f"in question: K = {report.asked}"
    axes.axvline(report.asked, color=theme.ink, linewidth=1.2, linestyle=(0, (2, 2)), label=asked)
    if report.best is not None and 1 < report.best <= report.steps[-1].accumulation_steps:
        axes.axvline(report.best, color=colour, linewidth=1.2, label=f"best: K* = {report.best:.3g}")
    axes.set_xlabel(f"accumulation steps K (batch = K x {report.microbatch_size * report.ranks} samples)")
    axes.set_ylabel("relative to K = 1, to the same loss")
    legend_below(figure, axes, theme, columns=3)
    caption(axes, title_of(report), theme, wrap=True)
    headline(figure, verdict_text(report).split(". ")[0] + ".", theme, partial=report.partial, size=13)
    return figure
