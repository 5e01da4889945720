"""Plots of surveys: the loss over the growing learning rate, or over another surveyed setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superbatch.results.survey import Survey
from superbatch.tuning.survey_ramp import to_axis

from ..report.survey_text import NAMES, conclusions, title_of
from ..report.surveys import SurveyArm, Surveys
from .arms import Style, mean_and_range, runs_by_row, styles_of
from .style import BLUE, DASHED, GREEN, PURPLE, VERMILION, Theme, caption, empty, headline, legend, panels
from .ticks import logarithmic

ABOVE = 1.2  # height of the axis above the first points, in units of their distance to the lowest point


def surveys(report: Surveys, *, dark: bool = False) -> Figure:
    """Draw a study of surveys: the smoothed curves with bands; below them the suggestion of each survey.

    Examples:
        >>> from superbatch.lab.studies.survey import Options, survey
        >>> figure = surveys(survey("digits", Options(splits="4x25", repeats=2, updates=20)))
        >>> [axes.get_xscale() for axes in figure.axes]
        ['log', 'log']
    """
    arms = [arm for arm in report.arms if arm.runs]
    ratios = (6.0, 1.0 + 0.45 * len(report.arms))
    height = 6.2 + 0.3 * len(arms)
    figure, (curves, rates), theme = panels(height, "a;b", dark=dark, sharex=True, height_ratios=ratios)
    for axes in (curves, rates):
        logarithmic(axes.xaxis)
    styles = styles_of([arm.claim for arm in arms], theme)
    _draw_curves(curves, arms, styles, theme)
    _draw_rates(rates, report, arms, styles, theme)
    headline(figure, title_of(report), theme, conclusions(report)[0], partial=report.partial, size=10)
    return figure


def one_survey(report: Survey, *, dark: bool = False) -> Figure:
    """Draw one survey: the losses as dots, the smoothed curve, the suggestions and an early stop.

    Examples:
        >>> from superbatch.tuning.survey import Sweep
        >>> sweep = Sweep("lr", 1e-4, 10.0, 50)
        >>> _ = [sweep.add((value - 0.1) ** 2 + 1e-3) for value in sweep.values]
        >>> one_survey(sweep.report()).axes[0].get_xlabel()
        'learning rate'
    """
    figure, (axes,), theme = panels(4.6, dark=dark, width=8)
    logarithmic(axes.xaxis)
    x = [to_axis(report.what, value) for value in report.values]
    label = "each window, before its update"
    axes.plot(x, report.losses, ".", color=theme.ink, alpha=0.35, markersize=5, label=label)
    axes.plot(x, report.smooth, color=BLUE, linewidth=2, label="smoothed")
    _limit(axes, [report.smooth, report.losses])
    found = report.suggestions
    marks = (
        ("onset", found.onset, found.onset_range, GREEN),
        ("minimum / 10", found.minimum, found.minimum_range, PURPLE),
    )
    for name, value, ends, colour in marks:
        if value is not None:
            line = {"color": colour, "linewidth": 1.4, "linestyle": DASHED, "label": f"{name}: {value:.3g}"}
            axes.axvline(to_axis(report.what, value), **line)
        if value is not None and ends is not None:
            at = [to_axis(report.what, end) for end in ends]
            axes.axvspan(*at, color=colour, alpha=0.12, linewidth=0)
    if report.stopped is not None and x:
        label = f"stopped at {report.values[-1]:.2g}"
        axes.axvline(x[-1], color=VERMILION, linewidth=1.4, label=label)
    axes.set(xlabel=_x_label(report.what), ylabel="loss of the window")
    legend(axes, theme)
    return figure


def _draw_curves(axes: Axes, arms: Sequence[SurveyArm], styles: Sequence[Style], theme: Theme) -> None:
    drawn: list[Sequence[float]] = []
    for arm, style in zip(arms, styles, strict=True):
        surveys = [run.survey for run in arm.runs]
        # Only as far as every survey goes: a mean would jump where one survey stops.
        shared = min(len(survey.smooth) for survey in surveys)
        x = [to_axis(surveys[0].what, value) for value in surveys[0].values[:shared]]
        label = f"{arm.name} (real batch)" if arm.claim == "real" else arm.name
        drawn.append(mean_and_range(axes, x, [each.smooth[:shared] for each in surveys], style, label))
        ends = [
            to_axis(s.what, s.values[-1] if s.values else s.low) for s in surveys if s.stopped is not None
        ]
        place = {"transform": axes.get_xaxis_transform(), "markersize": 5}
        axes.plot(ends, [0.985] * len(ends), "x", color=style.colour, **place)
    axes.set_ylabel("training loss, smoothed")
    caption(axes, "Mean and range of the surveys; a cross at the top: one stopped there", theme)
    _limit(axes, drawn)
    if any(drawn):
        legend(axes, theme, loc="lower left", handlelength=3.4)
    else:
        empty(axes, "no survey has a point", theme)


def _draw_rates(
    axes: Axes, report: Surveys, arms: Sequence[SurveyArm], styles: Sequence[Style], theme: Theme
) -> None:
    baseline = arms[0].rate if arms else None
    centre = None if baseline is None else to_axis(report.what, baseline)
    band = None if centre is None else (centre / 10**report.margin, centre * 10**report.margin)
    rows: list[tuple[str, list[float], Style]] = []
    for arm, style in zip(arms, styles, strict=True):
        found = [run.survey.suggestion for run in arm.runs]
        rows.append((arm.name, [to_axis(report.what, each) for each in found if each is not None], style))
    runs_by_row(axes, rows, theme, band=band, log=True)
    axes.set_xlabel(_x_label(report.what))
    title = f"Suggestions (onset of the fall): dots, with their mean; band: ± {report.margin:g} decades"
    caption(axes, title, theme)


def _limit(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Set the top of the y axis a little above the first losses: diverging losses have no bound."""
    points = [value for curve in curves for value in curve]
    if not points:
        return
    first, lowest = max(max(curve[:5]) for curve in curves if curve), min(points)
    fall = (first - lowest) or abs(first)
    axes.set_ylim(lowest - 0.15 * fall, min(first + ABOVE * fall, max(points) + 0.05 * fall))


def _x_label(what: Any) -> str:
    return "updates averaged over, 1 / (1 - momentum)" if what == "momentum" else NAMES[what]
