"""Schedules of `accumulation_steps`: how many micro-batches make the window of update 0, 1, 2, ...

A schedule is a function of the update index, so that it is the same on every rank and after a restart.
"""

from __future__ import annotations

# pyright: strict
from bisect import bisect_right
from collections.abc import Callable, Mapping

from .errors import InputError

Schedule = Callable[[int], int]


def check_steps(value: object, what: str = "accumulation_steps") -> int:
    """Return a number of micro-batches if it is a positive int.

    Raises:
        InputError: it is not.

    Examples:
        >>> check_steps(4)
        4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what}={value!r} is no number of micro-batches. Pass a positive int.")
    return value


def check_update(value: object, what: str) -> int:
    """Return an update index if it is an int of 0 or more; raises InputError otherwise.

    Examples:
        >>> check_update(0, "first_update")
        0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{what}={value!r} is no index of an update. Pass an int of 0 or more.")
    return value


def constant(accumulation_steps: int) -> Schedule:
    """The same window for every update.

    Examples:
        >>> constant(8)(1000)
        8
    """
    steps = check_steps(accumulation_steps)
    return lambda update: steps


def piecewise(steps_from: Mapping[int, int]) -> Schedule:
    """Another window from given updates on.

    Args:
        steps_from: first update -> number of micro-batches from there on; must say what holds from update 0.

    Raises:
        InputError: nothing is said for update 0, or an entry is no valid update or number.

    Examples:
        >>> schedule = piecewise({0: 1, 100: 4, 200: 16})
        >>> [schedule(update) for update in (0, 99, 100, 250)]
        [1, 1, 4, 16]
    """
    if not isinstance(steps_from, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (untyped callers)
        raise InputError(
            f"piecewise({steps_from!r}) does not map updates to numbers of micro-batches. Pass a dict such "
            f"as {{0: 1, 100: 4}}."
        )
    starts = sorted(check_update(update, "update") for update in steps_from)
    if not starts or starts[0] != 0:
        raise InputError(
            f"piecewise({dict(steps_from)!r}) says nothing of the updates before its first entry. Add an "
            "entry for update 0."
        )
    steps = [check_steps(steps_from[start]) for start in starts]
    return lambda update: steps[bisect_right(starts, update) - 1]


def ramp(start: int, stop: int, updates: int) -> Schedule:
    """Grow (or shrink) linearly from `start` to `stop` over a number of updates, then stay.

    ``K(t) = round(start + (stop - start) * min(t / updates, 1))``

    Args:
        start: micro-batches of update 0.
        stop: micro-batches from update `updates` on.
        updates: length of the ramp, in updates.

    Examples:
        >>> schedule = ramp(1, 9, 4)
        >>> [schedule(update) for update in (0, 1, 2, 4, 100)]
        [1, 3, 5, 9, 9]
    """
    first, last, length = (
        check_steps(start, "start"),
        check_steps(stop, "stop"),
        check_steps(updates, "updates"),
    )
    return lambda update: round(first + (last - first) * min(update / length, 1.0))


def as_schedule(accumulation_steps: int | Schedule) -> Schedule:
    """Make a schedule of an int or of any function of the update index; every value it gives is checked.

    Raises:
        InputError: it is neither; or, when called, it gives anything but a positive int.

    Examples:
        >>> as_schedule(lambda update: 2**update)(3)
        8
    """
    if not callable(accumulation_steps):
        return constant(accumulation_steps)
    schedule = accumulation_steps
    return lambda update: check_steps(schedule(update), f"accumulation_steps({update})")
