"""Schedules of `accumulation_steps`: the number of micro-batches in the window of update 0, 1, 2, ...

A schedule is a pure function of the update index, so ranks agree, and a restart needs no saved state.
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
        InputError: it is anything else.

    Examples:
        >>> check_steps(4)
        4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what}={value!r} is not a positive int. Pass a positive int.")
    return value


def check_update(value: object, what: str) -> int:
    """Return an update index if it is an int of 0 or more; raises InputError otherwise.

    Examples:
        >>> check_update(0, "first_update")
        0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{what}={value!r} is not the index of an update. Pass an int of 0 or more.")
    return value


def constant(accumulation_steps: int) -> Schedule:
    """Schedule with the same number of micro-batches for every update.

    Examples:
        >>> constant(8)(1000)
        8
    """
    steps = check_steps(accumulation_steps)
    return lambda update: steps


def piecewise(steps_from: Mapping[int, int]) -> Schedule:
    """Schedule that changes the number of micro-batches at given updates.

    Args:
        steps_from: first update -> number of micro-batches from that update on; update 0 must be a key.

    Raises:
        InputError: there is no entry for update 0, or an entry is not a valid update or number.

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
            f"piecewise({dict(steps_from)!r}) has no entry for update 0. Add one, such as {{0: 1, ...}}."
        )
    steps = [check_steps(steps_from[start]) for start in starts]
    return lambda update: steps[bisect_right(starts, update) - 1]


def ramp(start: int, stop: int, updates: int) -> Schedule:
    """Schedule that grows (or shrinks) linearly from `start` to `stop`, then stays at `stop`.

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
    """Return a schedule for an int or for a function of the update index; it checks each returned value.

    Raises:
        InputError: the argument is neither, or the function does not return a positive int.

    Examples:
        >>> as_schedule(lambda update: 2**update)(3)
        8
    """
    if not callable(accumulation_steps):
        return constant(accumulation_steps)
    schedule = accumulation_steps
    return lambda update: check_steps(schedule(update), f"accumulation_steps({update})")
