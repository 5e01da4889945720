"""Result of a learning-rate survey: the curve, its end, and the suggested values."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass
from typing import Literal

What = Literal["lr", "momentum", "weight_decay"]
"""Option of the optimizer that a survey changes."""


Range = tuple[float, float]
"""Lower and upper end."""


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """Values that a survey suggests, each by its own rule (see `superbatch.tuning.survey_suggestions`).

    A range is the middle 90 % of the values that the rule would give with other noise. A rule whose range is
    wider than 0.3 decades suggests no value.

    Attributes:
        onset: value at which the loss has fallen by a fifth of its total fall.
        minimum: a tenth of the value at which the loss is lowest.
        steepest: value at which the loss falls fastest per decade; training breaks down close to it.
        reason: why no rule suggests a value; None if one does.
        onset_range: range of `onset`, also if it is too wide for a value; None if the curve has no such
            point.
        minimum_range: range of `minimum`, in the same way.
        steepest_range: range of `steepest`, in the same way.
    """

    onset: float | None
    minimum: float | None
    steepest: float | None
    reason: str | None
    onset_range: Range | None = None
    minimum_range: Range | None = None
    steepest_range: Range | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A survey: training loss while one option of the optimizer grows from update to update.

    Attributes:
        what: the changed option.
        values: its value at each point, in the leading parameter group (the one with the largest value);
            increasing.
        losses: weighted mean loss of each window, before the update of the point.
        smooth: the debiased exponential mean of `losses`.
        suggestions: suggested values of the option.
        stopped: reason for an end before the last point; None if the survey reached its last point.
        low: the first value of the ramp.
        high: the last value of the ramp.
        updates: number of points of the whole ramp.
        beta: decay factor of the smoothing.
        ratios: value of each parameter group over that of the leading one; constant.
        skipped: points without an update (overflow of a GradScaler).
        epochs: number of passes begun over the batches.
        seconds: wall time.

    Examples:
        >>> found = Suggestions(onset=0.01, minimum=0.02, steepest=None, reason=None)
        >>> survey = Survey(
        ...     what="lr", values=(0.1, 1.0), losses=(2.0, 1.0), smooth=(2.0, 1.4), suggestions=found,
        ...     stopped=None, low=0.1, high=1.0, updates=2, beta=0.8, ratios=(1.0, 0.1), skipped=(),
        ...     epochs=1, seconds=0.1,
        ... )
        >>> survey.suggestion, survey.of_groups()
        (0.01, (0.01, 0.001))
    """

    what: What
    values: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    suggestions: Suggestions
    stopped: str | None
    low: float
    high: float
    updates: int
    beta: float
    ratios: tuple[float, ...]
    skipped: tuple[int, ...]
    epochs: int
    seconds: float

    @property
    def suggestion(self) -> float | None:
        """Return the default suggestion, `Suggestions.onset`; None if that rule suggests no value."""
        return self.suggestions.onset

    def of_groups(self, value: float | None = None) -> tuple[float, ...]:
        """Return the value for each parameter group, in its ratio to the leading one.

        Args:
            value: value of the leading group; None for `suggestion`.

        Returns:
            One value per group; empty without a suggestion.
        """
        leading = self.suggestion if value is None else value
        return () if leading is None else tuple(leading * ratio for ratio in self.ratios)
