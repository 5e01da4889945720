"""Plot of a noise study: the noise scale during the training, and the time to the same loss by K."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superbatch.results.advice import Steps

from ..report.noise_study import NoiseStudy, band_of, findings, title_of
from .style import BLUE, DASHED, GREEN, VERMILION, Theme, caption, empty, headline, legend, line, panels
from .ticks import logarithmic


def noise(report: NoiseStudy, *, dark: bool = False) -> Figure:
    """Draw a noise study: the noise scale with its interval; below it the time to the same loss by K.

    Examples:
        >>> from superbatch.lab.studies.noise import Options
        >>> from superbatch.lab.studies.noise import noise as study
        >>> figure = noise(study("digits", Options(updates=60)))
        >>> figure.axes[0].get_xlabel()
        'updates'
    """
    figure, (over_run, against_k), theme = panels(8, "a;b", dark=dark, height_ratios=(5, 4))
    _over_run(over_run, report, theme)
    _against_k(against_k, report, theme)
    headline(figure, title_of(report), theme, findings(report)[0], partial=report.partial, size=11)
    return figure


def _over_run(axes: Axes, report: NoiseStudy, theme: Theme) -> None:
    axes.set(xlabel="updates", ylabel="samples")
    logarithmic(axes.yaxis)
    axes.set_xlim(0, max(1, report.updates) * 1.01)  # an interrupted run may have no update
    caption(axes, "Noise scale of the gradient, 95 % interval", theme)
    known = [each for each in report.points if each.batch_size]
    unknown = [each for each in report.points if each.batch_size is None]
    scales = [each.batch_size or 1.0 for each in known]
    # A point without an estimate has no upper end to draw.
    ends = [each.low for each in report.points] + [each.high for each in known]
    heights = [report.batch_size, *scales, *ends, *(size for each in report.points for size in each.by_model)]
    drawn = [height for height in heights if height and math.isfinite(height)]
    bottom, top = min(drawn) / 2, max(drawn) * 3
    axes.set_ylim(bottom, top)
    if unknown:
        half = report.updates / max(1, len(report.points)) / 2
        for number, each in enumerate(unknown):
            label = None if number else "not determined"
            span = (each.update - 2 * half, each.update)
            axes.axvspan(*span, color=theme.faint, alpha=0.35, linewidth=0, label=label)
        bounds = [(each.update - half, each.low or None) for each in unknown]
        line(axes, bounds, "^", color=VERMILION, markersize=6, label="at least (no upper end)")
    if known:
        updates = [each.update for each in known]
        below = [max(bottom, each.low) for each in known]
        above = [min(top, each.high) for each in known]
        axes.vlines(updates, below, above, color=BLUE, alpha=0.35, linewidth=5)
        axes.plot(updates, scales, "o", color=BLUE, markersize=5, label="noise scale")
    _hatch(axes, [(each.update, each.by_model) for each in report.points], BLUE)
    batch = f"the batch: {report.batch_size}"
    axes.axhline(report.batch_size, color=theme.ink, linewidth=1.2, linestyle=DASHED, label=batch)
    legend(axes, theme, ncols=3, loc="lower right")


def times_against_k(axes: Axes, steps: Sequence[Steps], colour: str, *, range_of: str) -> None:
    """Draw the time to the same loss over K with its range; the band of Adam's models is hatched."""
    k = [each.accumulation_steps for each in steps]
    axes.set_xscale("log", base=2)
    axes.set_xticks(k, [str(each) for each in k])
    axes.minorticks_off()  # they would lie between the predicted K
    logarithmic(axes.yaxis, base=2)
    lows, highs = [each.low for each in steps], [each.high for each in steps]
    axes.fill_between(k, lows, highs, color=colour, alpha=0.2, linewidth=0, label=f"range: {range_of}")
    _hatch(axes, [(each.accumulation_steps, each.by_model) for each in steps], colour)
    times = [(each.accumulation_steps, each.time) for each in steps]
    line(axes, times, "o-", color=colour, linewidth=2, markersize=6, label="time")


def _hatch(axes: Axes, points: Sequence[tuple[int, Sequence[float | None]]], colour: str) -> None:
    """Hatch the band of Adam's models, with a gap where fewer than two are known."""
    bands = [band_of(models) for _, models in points]
    if any(bands):
        low, high = ([band[end] if band else math.nan for band in bands] for end in (0, 1))
        style = {"facecolor": "none", "hatch": "///", "alpha": 0.5, "linewidth": 0, "edgecolor": colour}
        axes.fill_between([x for x, _ in points], low, high, label="band of Adam's models", **style)


def _against_k(axes: Axes, report: NoiseStudy, theme: Theme) -> None:
    axes.set_xlabel(f"micro-batches of {report.microbatch_size} samples per update, K")
    axes.set_ylabel("time to target, W(K) / W(1)")
    caption(axes, "Time to the same loss, by measured times and the noise scale of the run", theme)
    if not report.steps:
        empty(axes, "nothing was timed", theme)
        return
    times_against_k(axes, report.steps, GREEN, range_of="interval of the noise scale")
    axes.axhline(1, color=theme.ink, linewidth=1)
    best = report.best
    if best is None:
        text = "the noise scale is not determined: the time may be anywhere in the band"
        axes.text(0.02, 0.9, text, transform=axes.transAxes, color=VERMILION, fontsize=10)
    else:
        label = f"fastest: K = {best.accumulation_steps}"
        line(axes, [(best.accumulation_steps, best.time)], "o", color=VERMILION, markersize=10, label=label)
    legend(axes, theme, loc="upper left", bbox_to_anchor=(0.0, 0.86))
