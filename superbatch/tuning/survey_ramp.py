"""Ramp of a survey: the value of the surveyed option at each point.

Learning rate and weight decay grow exponentially: ``x_t = low (high / low)^(t / (n - 1))``. A momentum ``m``
multiplies the length of an update by ``x = 1 / (1 - m)``. So its ramp is exponential in this x.
"""

from __future__ import annotations

# pyright: strict
import math
from numbers import Real
from typing import Any

from ..errors import InputError
from ..results.survey import What

LEAST_UPDATES = 12
"""Fewest points of a survey. Suggestions need 16: they leave out the first 5 and the last 3."""


def exponential(low: float, high: float, updates: int) -> tuple[float, ...]:
    """Return ``low (high / low)^(t / (n - 1))`` for t = 0 .. n - 1.

    Args:
        low: the first value, positive.
        high: the last value, greater than `low`.
        updates: n, the number of values; at least 12.

    Returns:
        Increasing values; the first and the last are exactly `low` and `high`.

    Raises:
        InputError: an argument is out of range.

    Examples:
        >>> [round(value, 6) for value in exponential(1e-2, 1e1, 12)][::11]
        [0.01, 10.0]
    """
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < LEAST_UPDATES:  # pyright: ignore[reportUnnecessaryIsInstance]  (a caller may not be typed)
        raise InputError(
            f"updates={updates!r} is not an int of at least {LEAST_UPDATES}. Pass at least 16 to get "
            "suggestions; 100 is usual."
        )
    ends: list[Any] = [low, high]
    numbers = all(isinstance(end, Real) and end is not True for end in ends)  # False fails 0 < low
    if not numbers or not 0 < low < high < math.inf:
        raise InputError(
            f"low={low!r} and high={high!r} are not increasing positive numbers. "
            "Pass 0 < low < high, such as low=1e-6, high=10."
        )
    # The ends are the arguments themselves, because the formula would round the last one.
    inner = (low * (high / low) ** (t / (updates - 1)) for t in range(1, updates - 1))
    return (low, *inner, high)


def values_of(what: What, low: float, high: float, updates: int) -> tuple[float, ...]:
    """Return the value of the surveyed option at each point.

    Args:
        what: name of the option.
        low: its first value.
        high: its last value.
        updates: number of points.

    Returns:
        Increasing values of the option itself.

    Raises:
        InputError: an argument is out of range.

    Examples:
        >>> [round(m, 3) for m in values_of("momentum", 0.0, 0.99, 13)][::6]
        [0.0, 0.9, 0.99]
    """
    if what != "momentum":
        return exponential(low, high, updates)
    if not 0 <= low < high < 1:
        raise InputError(
            f"low={low!r} and high={high!r} are not increasing values of momentum. Pass 0 <= low < high < 1, "
            "such as low=0.0, high=0.999."
        )
    # A momentum of 0 or 0.999 must come out exactly, so the ends are not converted forth and back.
    inner = exponential(to_axis(what, low), to_axis(what, high), updates)[1:-1]
    return (low, *(from_axis(what, x) for x in inner), high)


def to_axis(what: What, value: float) -> float:
    """Return the position on the survey's logarithmic axis for a value of the option.

    Args:
        what: name of the option.
        value: value of the option.

    Returns:
        ``1 / (1 - m)`` for a momentum m; else the value itself.

    Examples:
        >>> to_axis("lr", 0.1), round(to_axis("momentum", 0.9), 9)
        (0.1, 10.0)
    """
    return 1 / (1 - value) if what == "momentum" else value


def from_axis(what: What, x: float) -> float:
    """Return the value of the option at a position on the survey's axis; the inverse of `to_axis`.

    Args:
        what: name of the option.
        x: position on the axis, positive.

    Returns:
        The value. A momentum is at least 0, also for positions below 1.

    Examples:
        >>> from_axis("lr", 0.1), from_axis("momentum", 10.0), from_axis("momentum", 0.5)
        (0.1, 0.9, 0.0)
    """
    # A suggestion of a tenth of the minimum may be below 1, the position of momentum 0.
    return max(0.0, 1 - 1 / x) if what == "momentum" else x
