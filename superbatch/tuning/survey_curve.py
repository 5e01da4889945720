"""The curve of a survey while it is made: losses, smoothed, and when to stop.

Smoothing is a debiased exponential mean, ``s_t = beta s_(t-1) + (1 - beta) l_t``, shown as
``s_t / (1 - beta^(t+1))``: without the division the first points would be too small. A survey ends when a
loss is not finite, or when the *smoothed* loss is more than four times its best: one noisy window ends
nothing.
"""

from __future__ import annotations

# pyright: strict
import math

BETA = 0.8
"""Of a survey of 100 updates; another number of updates smooths over the same share of the axis."""

TOO_MUCH = 4.0
"""A smoothed loss of this many times its best ends a survey."""

PATIENCE = 5
"""Points that a survey has at least, if they are finite."""


def smoothing(updates: int) -> float:
    """Return the beta that smooths over the same share of the ramp as 0.8 does with 100 updates.

    Args:
        updates: of the survey.

    Returns:
        ``0.8^(100 / updates)``.

    Examples:
        >>> smoothing(100), round(smoothing(400), 3)
        (0.8, 0.946)
    """
    return BETA ** (100 / updates)


class Curve:
    """Losses of a survey's points, in order.

    Args:
        beta: of the smoothing, 0 (none) to below 1.

    Attributes:
        losses: as they came.
        smooth: debiased means.

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
        """Note the loss of the next point.

        Args:
            loss: of the whole window, before its update.

        Returns:
            Why the survey ends here; None to continue. A loss that is not finite is no point of the curve.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self.losses.append(loss)
        self._mean = self._beta * self._mean + (1 - self._beta) * loss
        smooth = self._mean / (1 - self._beta ** len(self.losses))
        self.smooth.append(smooth)
        self._best = min(self._best, smooth)
        if len(self.smooth) <= PATIENCE or not exploded(smooth, self._best):
            return None
        return f"the smoothed loss {smooth:.4g} is more than {TOO_MUCH:g} times its best, {self._best:.4g}"


def exploded(smooth: float, best: float) -> bool:
    """Return whether a smoothed loss says that training has broken down.

    ``smooth > 4 best`` where the best is positive; a loss that may be negative (a log-likelihood) has
    broken down when it lies 3 |best| above its best, which is the same for a positive one.

    Args:
        smooth: now.
        best: the least so far.

    Examples:
        >>> exploded(4.1, 1.0), exploded(3.9, 1.0), exploded(-0.9, -1.0), exploded(2.1, -1.0)
        (True, False, False, True)
    """
    return smooth - best > (TOO_MUCH - 1) * abs(best)
