"""Ramp, curve and report of a survey, independent of the framework that makes the updates."""

from __future__ import annotations

# pyright: strict
import statistics
from collections.abc import Sequence

from ..errors import InputError
from ..results.survey import Range, Suggestions, Survey, What
from .survey_curve import Curve, smoothing
from .survey_ramp import from_axis, to_axis, values_of
from .survey_suggestions import still_falling, suggest


class Sweep:
    """A running survey: the value of the option at each point, and the losses so far.

    Args:
        what: name of the surveyed option.
        low: its first value.
        high: its last value.
        updates: number of points of the ramp.

    Attributes:
        values: value of the option at each point.
        stopped: reason for an end before the last point; None if the survey reached its last point.

    Raises:
        InputError: the arguments describe no increasing ramp.

    Examples:
        >>> sweep = Sweep("lr", 1e-4, 10.0, 50)
        >>> for value in sweep.values:
        ...     if not sweep.add((value - 0.1) ** 2 + 1e-3):
        ...         break
        >>> report = sweep.report()
        >>> len(report.values) < 50, report.stopped
        (True, 'the smoothed loss ... is more than 4 times its minimum ...')
        >>> 0.001 < report.suggestion < 0.1
        True
    """

    def __init__(self, what: What, low: float, high: float, updates: int) -> None:
        self._what: What = what
        self._low, self._high = low, high
        self.values = values_of(what, low, high, updates)
        self._beta = smoothing(updates)
        self._curve = Curve(self._beta)
        self.stopped: str | None = None

    def add(self, loss: float) -> bool:
        """Append the loss of the next point; return False if the survey must end here.

        Args:
            loss: loss of the window, before its update.
        """
        reason = self._curve.add(loss)
        if reason is not None:
            self.stop(reason)
        return reason is None

    def stop(self, reason: str) -> None:
        """Record the reason for which the survey ends; the first reason counts.

        Args:
            reason: the reason, in words.
        """
        self.stopped = self.stopped or reason

    def report(
        self,
        *,
        ratios: Sequence[float] = (1.0,),
        skipped: Sequence[int] = (),
        epochs: int = 1,
        seconds: float = 0.0,
    ) -> Survey:
        """Return the result of the survey.

        Args:
            ratios: value of each parameter group over that of the leading one.
            skipped: indices of points without an update.
            epochs: number of passes begun over the batches.
            seconds: wall time.
        """
        losses, smooth = self._curve.losses, self._curve.smooth
        values = self.values[: len(losses)]
        planned = len(self.values)
        if len(values) == planned:  # the last point's loss may be a reason to stop, but no point is missing
            self.stopped = None
        return Survey(
            what=self._what,
            values=values,
            losses=tuple(losses),
            smooth=tuple(smooth),
            suggestions=_suggestions(self._what, values, losses),
            stopped=self.stopped,
            low=self._low,
            high=self._high,
            updates=planned,
            beta=self._beta,
            ratios=tuple(ratios),
            skipped=tuple(skipped),
            epochs=epochs,
            seconds=seconds,
        )


def remarks(report: Survey) -> list[str]:
    """Return advice on the next step after a survey, one sentence each.

    Args:
        report: report of the survey.

    Returns:
        Sentences; empty if there is nothing to advise.

    Examples:
        >>> sweep = Sweep("lr", 1e-4, 1e-2, 50)
        >>> all(sweep.add(1 - value) for value in sweep.values)
        True
        >>> remarks(sweep.report())
        ['The loss still fell at the end of the ramp, at 0.01: survey up to a higher value.']
    """
    advice: list[str] = []
    if report.suggestions.reason is not None:
        advice.append(f"There is no suggestion: {report.suggestions.reason}.")
    if report.stopped is None and still_falling(report.smooth):
        advice.append(
            f"The loss still fell at the end of the ramp, at {report.values[-1]:.3g}: survey up to a higher "
            "value."
        )
    if report.suggestions.reason is None and report.suggestion is None:
        low, high = report.suggestions.onset_range or (report.low, report.high)
        advice.append(
            f"The loss begins to fall between {low:.2g} and {high:.2g}; noise hides the exact value. Use "
            "larger batches or more points, or average several surveys."
        )
    if report.skipped:
        advice.append(
            f"{len(report.skipped)} points made no update: the GradScaler was still lowering its scale."
        )
    return advice


def averaged(surveys: Sequence[Survey]) -> Suggestions:
    """Suggest values from the mean curve of several surveys, in which noise partly cancels.

    The mean covers the points that all surveys reached. It is geometric if all losses are positive, else
    arithmetic.

    Args:
        surveys: surveys over one ramp, with different seeds.

    Returns:
        Suggestions of the mean curve.

    Raises:
        InputError: there is no survey, or their ramps differ.

    Examples:
        >>> from random import Random
        >>> surveys = []
        >>> for seed in range(5):
        ...     sweep, noise = Sweep("lr", 1e-4, 10.0, 60), Random(seed)
        ...     for value in sweep.values:
        ...         loss = 1 / (1 + 10 * value) + value**2
        ...         _ = sweep.add(loss * noise.lognormvariate(0, 0.1))
        ...     surveys.append(sweep.report())
        >>> {survey.suggestion for survey in surveys}, round(averaged(surveys).onset, 3)
        ({None}, 0.024)
    """
    ramps = {(each.what, each.low, each.high, each.updates) for each in surveys}
    if len(ramps) != 1:
        raise InputError(
            f"The {len(surveys)} surveys have {len(ramps)} different ramps, and a mean curve needs one. "
            "Pass surveys of one option with the same low, high and updates."
        )
    shared = min(len(each.losses) for each in surveys)
    columns = list(zip(*(each.losses[:shared] for each in surveys), strict=True))
    positive = all(loss > 0 for column in columns for loss in column)
    # The geometric mean is the mean of the logarithms, which `suggest` smooths.
    mean = statistics.geometric_mean if positive else statistics.fmean
    first = surveys[0]
    return _suggestions(first.what, first.values[:shared], [mean(column) for column in columns])


def _suggestions(what: What, values: Sequence[float], losses: Sequence[float]) -> Suggestions:
    """Suggest values of the option: `suggest` works on the axis, so its results are converted back."""
    on_axis = suggest([to_axis(what, value) for value in values], losses)

    def value(x: float | None) -> float | None:
        return None if x is None else from_axis(what, x)

    def interval(ends: Range | None) -> Range | None:
        return None if ends is None else (from_axis(what, ends[0]), from_axis(what, ends[1]))

    return Suggestions(
        onset=value(on_axis.onset),
        minimum=value(on_axis.minimum),
        steepest=value(on_axis.steepest),
        reason=on_axis.reason,
        onset_range=interval(on_axis.onset_range),
        minimum_range=interval(on_axis.minimum_range),
        steepest_range=interval(on_axis.steepest_range),
    )
