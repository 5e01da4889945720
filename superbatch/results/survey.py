"""Result of a learning-rate survey: the curve, where it ended, and what it suggests."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass
from typing import Literal

What = Literal["lr", "momentum", "weight_decay"]
"""Which option of the optimizer a survey changes."""


Range = tuple[float, float]
"""Lower and upper end."""


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """Values that a survey suggests, each by its own rule (see `superbatch.tuning.survey_suggestions`).

    A range is the middle 90 % of places where the rule's point would lie with other noise; a rule whose range
    is wider than 0.3 decades suggests no value.

    Attributes:
        onset: where the loss has begun to fall: a fifth of its fall is done.
        minimum: a tenth of where the curve is lowest.
        steepest: where the loss falls fastest per decade: close to where training breaks down.
        reason: why there is none; None where a rule suggests a value.
        onset_range: of `onset`, also where that is too uncertain; None where the curve shows nothing.
        minimum_range: of `minimum`, likewise.
        steepest_range: of `steepest`, likewise.
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
        what: the option.
        values: of it at each point, in the parameter group that leads; increasing.
        losses: of each window, its weighted mean, before the point's update.
        smooth: the debiased exponential mean of `losses`.
        suggestions: values of the option.
        stopped: why the survey ended before its last point; None if it did not.
        low: the first value of the ramp.
        high: the last value of the ramp.
        updates: points of the whole ramp.
        beta: of the smoothing.
        ratios: of each parameter group's value to that of the leading one, kept throughout.
        skipped: points at which no update was made (a GradScaler's overflow).
        epochs: how often the batches were begun with.
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
        """The value that is suggested by default, that of `Suggestions.onset`; None where there is none."""
        return self.suggestions.onset

    def of_groups(self, value: float | None = None) -> tuple[float, ...]:
        """Return the value for each parameter group, in its ratio to the leading one.

        Args:
            value: of the leading group; None for `suggestion`.

        Returns:
            One value per group; empty where nothing is suggested.
        """
        leading = self.suggestion if value is None else value
        return () if leading is None else tuple(leading * ratio for ratio in self.ratios)
