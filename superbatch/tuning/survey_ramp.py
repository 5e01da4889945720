"""The ramp of a survey: which value of the surveyed option each point has.

Learning rate and weight decay grow exponentially, ``x_t = low (high / low)^(t / (n - 1))``. A momentum
``m`` is surveyed by how many updates it averages over, ``x = 1 / (1 - m)``: at a fixed rate an update is
``x`` times as long, so ``1 - m`` falls exponentially.
"""

from __future__ import annotations

# pyright: strict
import math
from numbers import Real
from typing import Any

from ..errors import InputError
from ..results.survey import What

LEAST_UPDATES = 12
"""Points of a survey, at least: the first 5 and the last 3 suggest nothing."""


def exponential(low: float, high: float, updates: int) -> tuple[float, ...]:
    """Return ``low (high / low)^(t / (n - 1))`` for t = 0 .. n - 1.

    Args:
        low: the first value, positive.
        high: the last value, greater.
        updates: n.

    Returns:
        Increasing values; the first and the last are exactly `low` and `high`.

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> [round(value, 6) for value in exponential(1e-2, 1e1, 12)][::11]
        [0.01, 10.0]
    """
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < LEAST_UPDATES:  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller may not be typed)
        raise InputError(
            f"updates={updates!r} are too few: suggestions leave out the first 5 points and the last 3. Give "
            f"at least {LEAST_UPDATES}; 100 is usual."
        )
    ends: list[Any] = [low, high]
    numbers = all(isinstance(end, Real) and end is not True for end in ends)  # False is not above 0
    if not numbers or not 0 < low < high < math.inf:
        raise InputError(
            f"low={low!r} and high={high!r} are no rising ramp of positive numbers. "
            "Pass 0 < low < high, such as low=1e-6, high=10."
        )
    inner = (low * (high / low) ** (t / (updates - 1)) for t in range(1, updates - 1))
    return (low, *inner, high)


def values_of(what: What, low: float, high: float, updates: int) -> tuple[float, ...]:
    """Return the values that a survey sets, point by point.

    Args:
        what: the option.
        low: its first value.
        high: its last value.
        updates: points.

    Returns:
        Increasing values of the option itself.

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> [round(m, 3) for m in values_of("momentum", 0.0, 0.99, 13)][::6]
        [0.0, 0.9, 0.99]
    """
    if what != "momentum":
        return exponential(low, high, updates)
    if not 0 <= low < high < 1:
        raise InputError(
            f"A momentum cannot run from {low!r} to {high!r}. Give 0 <= low < high < 1, such as low=0.0, "
            "high=0.999."
        )
    inner = exponential(to_axis(what, low), to_axis(what, high), updates)[1:-1]
    return (low, *(from_axis(what, x) for x in inner), high)


def to_axis(what: What, value: float) -> float:
    """Return the position of a value of the option on the survey's axis.

    Args:
        what: the option.
        value: of it.

    Returns:
        The value; of a momentum ``1 / (1 - m)``.

    Examples:
        >>> to_axis("lr", 0.1), round(to_axis("momentum", 0.9), 9)
        (0.1, 10.0)
    """
    return 1 / (1 - value) if what == "momentum" else value


def from_axis(what: What, x: float) -> float:
    """Return the value of the option at a place of the survey's axis: what `to_axis` undoes.

    Args:
        what: the option.
        x: positive.

    Returns:
        The value; a momentum is at least 0.

    Examples:
        >>> from_axis("lr", 0.1), from_axis("momentum", 10.0), from_axis("momentum", 0.5)
        (0.1, 0.9, 0.0)
    """
    return max(0.0, 1 - 1 / x) if what == "momentum" else x
