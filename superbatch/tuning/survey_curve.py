"""Loss curve of a running survey: smoothing and the test for a breakdown of training.

The smoothed loss is a debiased exponential mean: ``s_t = beta s_(t-1) + (1 - beta) l_t``, divided by
``1 - beta^(t+1)`` because s starts at 0. A survey ends when a loss is not finite, or when the *smoothed* loss
exceeds four times its minimum. A single noisy window therefore does not end it.
"""

from __future__ import annotations

# pyright: strict
import math

BETA = 0.8
"""Decay factor of the smoothing in a survey of 100 updates."""

TOO_MUCH = 4.0
"""A smoothed loss above this multiple of its minimum ends a survey."""

PATIENCE = 5
"""A high loss does not end a survey within this many points: few points give no reliable minimum."""


def smoothing(updates: int) -> float:
    """Return the decay factor that smooths over the same share of the ramp as 0.8 does with 100 updates.

    Args:
        updates: number of points of the survey.

    Returns:
        ``0.8^(100 / updates)``.

    Examples:
        >>> smoothing(100), round(smoothing(400), 3)
        (0.8, 0.946)
    """
    return BETA ** (100 / updates)


class Curve:
    """Losses of the points of a survey, in order, with their smoothed values.

    Args:
        beta: decay factor of the smoothing, from 0 (no smoothing) to below 1.

    Attributes:
        losses: finite losses in the order of `add`.
        smooth: debiased exponential mean at each of them.

    Examples:
        >>> curve = Curve(0.8)
        >>> [curve.add(loss) for loss in (3.0, 2.0, 1.0)], [round(value, 3) for value in curve.smooth]
        ([None, None, None], [3.0, 2.444, 1.852])
    """

    def __init__(self, beta: float) -> None:
        self.losses: list[float] = []
        self.smooth: list[float] = []
        self._beta = beta
        self._mean = 0.0
        self._best = math.inf

    def add(self, loss: float) -> str | None:
        """Append the loss of the next point, unless it is not finite.

        Args:
            loss: loss of the whole window, before its update.

        Returns:
            The reason why the survey must end here; None to continue.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self.losses.append(loss)
        self._mean = self._beta * self._mean + (1 - self._beta) * loss
        # The weights so far sum to this divisor; without it the first means would be too small.
        smooth = self._mean / (1 - self._beta ** len(self.losses))
        self.smooth.append(smooth)
        self._best = min(self._best, smooth)
        if len(self.smooth) <= PATIENCE or not exploded(smooth, self._best):
            return None
        return f"the smoothed loss {smooth:.4g} is more than {TOO_MUCH:g} times its minimum {self._best:.4g}"


def exploded(smooth: float, best: float) -> bool:
    """Return True if the smoothed loss exceeds its minimum by more than ``3 |minimum|``.

    For a positive minimum this is ``smooth > 4 best``. It also holds for a loss that may be negative, such as
    a log-likelihood.

    Args:
        smooth: the current smoothed loss.
        best: the smallest smoothed loss so far.

    Examples:
        >>> exploded(4.1, 1.0), exploded(3.9, 1.0), exploded(-0.9, -1.0), exploded(2.1, -1.0)
        (True, False, False, True)
    """
    # smooth > 4 best would end every survey with negative losses at once.
    return smooth - best > (TOO_MUCH - 1) * abs(best)
