# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Axis of the rows in each array of the batch, declared as for `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..errors import InputError

Axes = int | Sequence[Any]


def by_argument(in_axes: Axes, count: int) -> tuple[Any, ...]:
    """Return the entry of `in_axes` for each of the arguments that are split.

    Raises:
        InputError: there are more entries or fewer.

    Examples:
        >>> by_argument(1, 2), by_argument((0, {"x": 1, "y": None}), 2)
        ((1, 1), (0, {'x': 1, 'y': None}))
    """
    if isinstance(in_axes, int):
        return (in_axes,) * count
    if len(in_axes) != count:
        raise InputError(
            f"in_axes={in_axes!r} has {len(in_axes)} entries for {count} arguments that are split. Pass an "
            "int for all, or one entry for each of batch_argnums, then of batch_argnames."
        )
    return tuple(in_axes)


def check_axes(in_axes: Any) -> Any:
    """Return `in_axes` if it is an int, or a list or tuple of entries.

    Raises:
        InputError: it is something else.

    Examples:
        >>> check_axes((0, None))
        (0, None)
    """
    if isinstance(in_axes, bool) or not isinstance(in_axes, int | list | tuple):
        raise InputError(
            f"in_axes={in_axes!r} is no int, list or tuple. Pass an int for all arguments that are split, or "
            'one entry for each, as in in_axes=(1, {"x": 0, "table": None}).'
        )
    return in_axes


def axes_of(entry: Any, value: Any, label: str) -> list[int | None]:
    """Return the axis of each leaf of an argument; None where every micro-batch gets the leaf whole.

    Args:
        entry: an int, None, or a tree of these that is a prefix of the argument's tree.
        value: the argument.
        label: its name, for the error text.

    Raises:
        InputError: the entry has another structure, or a leaf has no such axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> batch = {"x": jnp.zeros((4, 6)), "table": jnp.zeros(3)}
        >>> axes_of({"x": -1, "table": None}, batch, "batch")
        [None, 1]
    """

    # JAX treats None as a tree without leaves; here it applies to all leaves below.
    def is_none(node: Any) -> bool:
        return node is None

    found: list[int | None] = []

    def below(axis: Any, part: Any) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            found.append(None if axis is None else _axis(axis, leaf, label + jax.tree_util.keystr(path)))

    try:
        jax.tree.map(below, entry, value, is_leaf=is_none)
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise  # of a leaf, below
        # JAX's own text speaks of "custom node types" and prefixes.
        raise InputError(
            f"in_axes has {entry!r} for {label}, which has another structure. Pass an int, None, or a tree "
            f"prefix of {label}, as for jax.vmap."
        ) from error
    return found


def _axis(axis: Any, leaf: Any, label: str) -> int:
    dimensions = len(getattr(leaf, "shape", ()))
    if not dimensions:
        return 0  # a number is given to every micro-batch
    if isinstance(axis, int) and not isinstance(axis, bool) and -dimensions <= axis < dimensions:
        return axis % dimensions
    raise InputError(
        f"in_axes has {axis!r} for {label} of shape {tuple(leaf.shape)}. Pass an axis from {-dimensions} to "
        f"{dimensions - 1}, or None for an array that every micro-batch gets whole."
    )


def rows_of(array: Any, rows: Any, axis: int) -> Any:
    """Return rows of an array along an axis; also of an array of random keys.

    Examples:
        >>> import numpy as np
        >>> rows_of(np.arange(6).reshape(2, 3), [2, 0], 1).tolist()
        [[2, 0], [5, 3]]
    """
    # Not `np.take`: it does not support random keys.
    return array[(*[slice(None)] * axis, rows)]
