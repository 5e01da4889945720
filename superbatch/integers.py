# pyright: strict
"""Checks of integer arguments: ints of Python and NumPy are valid, bools and floats are not."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

from .batch.containers import array_shape
from .errors import InputError


def positive_int(name: str, value: Any) -> int:
    """Return an argument as an int; it must be an int of at least 1.

    Raises:
        InputError: when it is anything else, such as a bool or a float.

    Examples:
        >>> positive_int("microbatch_size", 8)
        8
    """
    if type(value) is int and value > 0:  # the usual case, without further calls
        return value
    number = _as_int(value)
    if number is None:
        kind = type(value).__name__
        raise InputError(f"{name}={value!r} is a {kind}, not an int. Pass a positive int.")
    if number < 1:
        raise InputError(f"{name}={value!r} is below 1. Pass a positive int.")
    return number


def checked_costs(costs: Any) -> list[int]:
    """Return the ints of a sequence or 1-d array, which must have one int of 0 or more for each sample.

    Raises:
        InputError: when it is anything else, such as bools or floats.

    Examples:
        >>> checked_costs((3, 0, 5))
        [3, 0, 5]
    """
    values: Any = costs if array_shape(costs) is None else costs.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
        raise InputError(f"costs={costs!r} is empty or not a sequence of ints. Pass one int for each sample.")
    checked = [_as_int(cost) for cost in cast("Sequence[Any]", values)]
    for index, cost in enumerate(checked):
        if cost is None or cost < 0:
            raise InputError(
                f"costs[{index}]={values[index]!r} is not an int of 0 or more. Pass one int for each sample."
            )
    return cast("list[int]", checked)


def _as_int(value: Any) -> int | None:
    """Return an int of Python or NumPy as an int, None for anything else."""
    if type(value) is int:
        return value
    if (
        isinstance(value, (bool, float))  # a mistake of the caller, not a number of samples
        or type(value).__name__ in ("bool", "bool_")  # NumPy's bool: "bool" from 2.0 on, "bool_" before
        or array_shape(value) not in (None, ())  # an array of one element also converts to an int
    ):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
