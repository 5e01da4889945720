"""A survey in progress, whatever makes the updates: its ramp, its curve, and the report in the end."""

from __future__ import annotations

# pyright: strict
from collections.abc import Sequence

from ..results.survey import Suggestions, Survey, What
from .survey_curve import Curve, smoothing
from .survey_ramp import from_axis, to_axis, values_of
from .survey_suggestions import by_chance, still_falling, suggest


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
            suggestions=_suggestions(self._what, values, smooth),
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
    if report.suggestions.reason is None and by_chance(report.losses, report.smooth, report.beta):
        found.append(
            "The loss fell no further than noise may make it fall: look at the curve, take more points or "
            "larger batches, or average several surveys."
        )
    if report.skipped:
        found.append(
            f"{len(report.skipped)} points made no update: the GradScaler was still lowering its scale."
        )
    return found


def _suggestions(what: What, values: Sequence[float], smooth: Sequence[float]) -> Suggestions:
    found = suggest([to_axis(what, value) for value in values], smooth)

    def back(x: float | None) -> float | None:
        return None if x is None else from_axis(what, x)

    return Suggestions(
        valley=back(found.valley),
        minimum=back(found.minimum),
        steepest=back(found.steepest),
        reason=found.reason,
    )
