"""The picture of surveys: loss over a growing learning rate, one band per way to make the batch."""

# matplotlib leaves the types of its keyword arguments open:
# pyright: standard

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from superbatch.results.survey import Survey
from superbatch.tuning.survey_ramp import to_axis

from ..report.survey_text import NAMES, headline, title_of
from ..report.surveys import SurveyArm, Surveys
from .style import BLUE, DARK, GREEN, LIGHT, ORANGE, PURPLE, SKY, VERMILION, Theme, plain_axes
from .ticks import readable

SPLITS: tuple[tuple[str, Any], ...] = (
    (BLUE, "solid"),
    (GREEN, (0, (5, 2))),
    (SKY, (0, (2, 1.5))),
    (PURPLE, (0, (6, 2, 1, 2))),
)
WRONG: tuple[tuple[str, Any], ...] = (
    (VERMILION, (0, (3, 1.5))),
    (ORANGE, (0, (3, 1.5))),
    (PURPLE, (0, (1, 1))),
)
ABOVE = 1.2
"""The axis ends so far above the first points, in units of the fall from there to the lowest."""


def surveys(report: Surveys, *, dark: bool = False) -> Figure:
    """Draw a study of surveys: the smoothed curves with bands, and below them what each survey suggests.

    Args:
        report: whole or partial.
        dark: light on dark instead of dark on light.

    Returns:
        A figure, 10 inches wide; save it with `png` or ``figure.savefig``.

    Examples:
        >>> from superbatch.lab.studies.survey import Options, survey
        >>> figure = surveys(survey("digits", Options(splits="4x25", repeats=2, updates=20)))
        >>> [axes.get_xscale() for axes in figure.axes]
        ['log', 'log']
    """
    theme = DARK if dark else LIGHT
    arms = [arm for arm in report.arms if arm.runs]
    figure = Figure(figsize=(10, 6.2 + 0.3 * len(arms)), facecolor=theme.paper, layout="constrained")
    heights = (6.0, 1.0 + 0.45 * len(report.arms))
    curves, rates = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    for axes in (curves, rates):
        plain_axes(axes, theme)
        axes.set_xscale("log")
        readable(axes.xaxis)
    styles = _styles(arms, theme)
    _draw_curves(curves, arms, styles, theme)
    _draw_rates(rates, report, arms, styles, theme)
    partial = " (interrupted: partial)" if report.partial else ""
    figure.suptitle(f"{title_of(report)}{partial}\n{headline(report)}", color=theme.ink, fontsize=10)
    return figure


def one_survey(report: Survey, *, dark: bool = False) -> Figure:
    """Draw one survey: losses as dots, the smoothed curve, the suggestions, where it stopped.

    Args:
        report: of `superbatch.torch.tuning.lr_survey`.
        dark: light on dark instead of dark on light.

    Returns:
        A figure, 8 inches wide.

    Examples:
        >>> from superbatch.tuning.survey import Sweep
        >>> sweep = Sweep("lr", 1e-4, 10.0, 50)
        >>> _ = [sweep.add((value - 0.1) ** 2 + 1e-3) for value in sweep.values]
        >>> one_survey(sweep.report()).axes[0].get_xlabel()
        'learning rate'
    """
    theme = DARK if dark else LIGHT
    figure = Figure(figsize=(8, 4.6), facecolor=theme.paper, layout="constrained")
    axes = figure.subplots()
    plain_axes(axes, theme)
    axes.set_xscale("log")
    readable(axes.xaxis)
    x = [to_axis(report.what, value) for value in report.values]
    axes.plot(
        x,
        report.losses,
        ".",
        color=theme.ink,
        alpha=0.35,
        markersize=5,
        label="each window, before its update",
    )
    axes.plot(x, report.smooth, color=BLUE, linewidth=2, label="smoothed")
    _limit(axes, [report.smooth])
    if report.losses:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, min(report.losses) - 0.02 * (high - low)), high)
    found = report.suggestions
    marks = (
        ("onset", found.onset, found.onset_range, GREEN),
        ("minimum / 10", found.minimum, found.minimum_range, PURPLE),
    )
    for name, value, ends, colour in marks:
        if value is not None:
            axes.axvline(to_axis(report.what, value), color=colour, linewidth=1.4, linestyle=(0, (4, 2)))
            axes.plot([], [], color=colour, linestyle=(0, (4, 2)), label=f"{name}: {value:.3g}")
        if value is not None and ends is not None:
            at = [to_axis(report.what, end) for end in ends]
            axes.axvspan(*at, color=colour, alpha=0.12, linewidth=0)
    if report.stopped is not None and x:
        axes.axvline(x[-1], color=VERMILION, linewidth=1.4)
        axes.plot([], [], color=VERMILION, label=f"stopped at {report.values[-1]:.2g}")
    axes.set_xlabel(_x_label(report.what))
    axes.set_ylabel("loss of the window")
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9)
    return figure


def _styles(arms: Sequence[SurveyArm], theme: Theme) -> list[tuple[str, Any, float]]:
    """The baseline is a broad pale line under the others: colour, dashes, width."""
    styles: list[tuple[str, Any, float]] = []
    splits = wrong = 0
    for arm in arms:
        if arm.claim == "real":
            styles.append((theme.ink, "solid", 7.0))
        elif arm.claim == "again":
            styles.append((theme.ink, (0, (1, 1)), 1.4))
        elif arm.claim in ("wrong", "other"):
            colour, dashes = WRONG[wrong % len(WRONG)]
            styles.append((colour, dashes, 1.6))
            wrong += 1
        else:
            colour, dashes = SPLITS[splits % len(SPLITS)]
            styles.append((colour, dashes, max(1.4, 2.6 - 0.5 * splits)))
            splits += 1
    return styles


def _draw_curves(
    axes: Axes, arms: Sequence[SurveyArm], styles: Sequence[tuple[str, Any, float]], theme: Theme
) -> None:
    drawn: list[Sequence[float]] = []
    for arm, (colour, dashes, width) in zip(arms, styles, strict=True):
        surveys = [run.survey for run in arm.runs]
        # As far as every survey goes: a mean over those that are left would jump where one stops.
        shared = min(len(survey.smooth) for survey in surveys)
        x = [to_axis(surveys[0].what, value) for value in surveys[0].values[:shared]]
        columns = list(zip(*(survey.smooth[:shared] for survey in surveys), strict=True))
        means = [statistics.fmean(column) for column in columns]
        drawn.append(means)
        baseline = arm.claim == "real"
        axes.plot(
            x,
            means,
            color=colour,
            linestyle=dashes,
            linewidth=width,
            alpha=0.22 if baseline else 1.0,
            label=f"{arm.name} (real batch)" if baseline else arm.name,
        )
        if len(surveys) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axes.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0)
        ends = [
            to_axis(s.what, s.values[-1] if s.values else s.low) for s in surveys if s.stopped is not None
        ]
        where = blended_transform_factory(axes.transData, axes.transAxes)
        axes.plot(ends, [0.985] * len(ends), "x", color=colour, markersize=5, transform=where)
    axes.set_ylabel("training loss, smoothed")
    axes.set_title(
        "Mean and range of the surveys; crosses at the top: where one stopped",
        fontsize=10,
        loc="left",
        color=theme.ink,
    )
    _limit(axes, drawn)
    if drawn:
        axes.legend(frameon=False, labelcolor=theme.ink, fontsize=9, loc="lower left", handlelength=3.4)
    else:
        axes.text(0.5, 0.5, "no survey was finished", transform=axes.transAxes, ha="center", color=theme.ink)


def _draw_rates(
    axes: Axes,
    report: Surveys,
    arms: Sequence[SurveyArm],
    styles: Sequence[tuple[str, Any, float]],
    theme: Theme,
) -> None:
    rows = [float(-i) for i in range(len(arms))]
    baseline = arms[0].rate if arms else None
    if baseline is not None:
        centre = to_axis(report.what, baseline)
        low, high = centre / 10**report.margin, centre * 10**report.margin
        axes.axvspan(low, high, color=theme.faint, alpha=0.4, linewidth=0)
    for arm, (colour, _, _), y in zip(arms, styles, rows, strict=True):
        found = [run.survey.suggestion for run in arm.runs]
        dots = [to_axis(report.what, value) for value in found if value is not None]
        spread = [y + 0.5 * (i / max(1, len(dots) - 1) - 0.5) for i in range(len(dots))]
        axes.scatter(dots, spread, s=12, color=colour, alpha=0.45, linewidths=0)
        if arm.rate is not None:
            axes.plot([to_axis(report.what, arm.rate)], [y], "D", color=colour, markersize=6)
    axes.set_yticks(rows, [arm.name for arm in arms])
    axes.set_ylim((rows[-1] if rows else 0.0) - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(_x_label(report.what))
    axes.set_title(
        f"Suggested (onset of the fall): dots surveys, diamond their mean; band ± {report.margin:g} decades",
        fontsize=10,
        loc="left",
        color=theme.ink,
    )


def _limit(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """End the axis as far above the first points as the lowest lies below: an explosion has no top."""
    points = [value for curve in curves for value in curve]
    if not points:
        return
    first, lowest = max(max(curve[:5]) for curve in curves if curve), min(points)
    fall = (first - lowest) or abs(first)
    axes.set_ylim(lowest - 0.15 * fall, min(first + ABOVE * fall, max(points) + 0.05 * fall))


def _x_label(what: Any) -> str:
    return "updates averaged over, 1 / (1 - momentum)" if what == "momentum" else NAMES[what]
