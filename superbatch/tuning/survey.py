"""A survey in progress, whatever makes the updates: its ramp, its curve, and the report in the end."""

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
    """The points of a survey, one after the other.

    Args:
        what: the option that is surveyed.
        low: its first value.
        high: its last value.
        updates: points of the ramp.

    Attributes:
        values: of the option, one per point.
        stopped: why it ended before its last point.

    Raises:
        InputError: there is no such ramp.

    Examples:
        >>> sweep = Sweep("lr", 1e-4, 10.0, 50)
        >>> for value in sweep.values:
        ...     if not sweep.add((value - 0.1) ** 2 + 1e-3):
        ...         break
        >>> report = sweep.report()
        >>> len(report.values) < 50, report.stopped
        (True, 'the smoothed loss ... is more than 4 times its best, ...')
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
        """Note the loss of the next point; return whether to continue.

        Args:
            loss: of the window, before its update.
        """
        reason = self._curve.add(loss)
        if reason is not None:
            self.stop(reason)
        return reason is None

    def stop(self, reason: str) -> None:
        """End the survey here.

        Args:
            reason: in words.
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
            ratios: of the parameter groups to the leading one.
            skipped: points without an update.
            epochs: how often the batches were begun with.
            seconds: wall time.
        """
        losses, smooth = self._curve.losses, self._curve.smooth
        values = self.values[: len(losses)]
        planned = len(self.values)
        if len(values) == planned:  # whatever the last point's loss was, nothing was left out
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
    """Return advice for the reader of a survey on the next step, if there is any.

    Args:
        report: of a survey.

    Returns:
        Sentences.

    Examples:
        >>> sweep = Sweep("lr", 1e-4, 1e-2, 50)
        >>> all(sweep.add(1 - value) for value in sweep.values)
        True
        >>> remarks(sweep.report())
        ['The loss still fell at the end of the ramp, at 0.01: survey up to a higher value.']
    """
    found: list[str] = []
    if report.suggestions.reason is not None:
        found.append(f"There is no suggestion: {report.suggestions.reason}.")
    if report.stopped is None and still_falling(report.smooth):
        found.append(
            f"The loss still fell at the end of the ramp, at {report.values[-1]:.3g}: survey up to a higher "
            "value."
        )
    if report.suggestions.reason is None and report.suggestion is None:
        low, high = report.suggestions.onset_range or (report.low, report.high)
        found.append(
            f"Noise leaves open where the loss begins to fall, between {low:.2g} and {high:.2g}: take larger "
            "batches or more points, or average several surveys."
        )
    if report.skipped:
        found.append(
            f"{len(report.skipped)} points made no update: the GradScaler was still lowering its scale."
        )
    return found


def averaged(surveys: Sequence[Survey]) -> Suggestions:
    """Suggest values from the mean curve of several surveys, whose noise partly cancels.

    Args:
        surveys: with one ramp, from different seeds. The mean is over log losses (over losses where one is
            not positive), as far as every survey went.

    Returns:
        What one survey with the mean curve suggests.

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
            f"{len(surveys)} surveys with {len(ramps)} ramps have no mean curve. "
            "Pass surveys of one option with the same low, high and updates."
        )
    shared = min(len(each.losses) for each in surveys)
    columns = list(zip(*(each.losses[:shared] for each in surveys), strict=True))
    positive = all(loss > 0 for column in columns for loss in column)
    mean = statistics.geometric_mean if positive else statistics.fmean
    first = surveys[0]
    return _suggestions(first.what, first.values[:shared], [mean(column) for column in columns])


def _suggestions(what: What, values: Sequence[float], losses: Sequence[float]) -> Suggestions:
    found = suggest([to_axis(what, value) for value in values], losses)

    def back(x: float | None) -> float | None:
        return None if x is None else from_axis(what, x)

    def ends(of: Range | None) -> Range | None:
        return None if of is None else (from_axis(what, of[0]), from_axis(what, of[1]))

    return Suggestions(
        onset=back(found.onset),
        minimum=back(found.minimum),
        steepest=back(found.steepest),
        reason=found.reason,
        onset_range=ends(found.onset_range),
        minimum_range=ends(found.minimum_range),
        steepest_range=ends(found.steepest_range),
    )
