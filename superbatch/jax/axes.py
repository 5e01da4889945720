# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Axis of the rows in each array of the batch: the option `in_axes`, as in `jax.vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..errors import InputError

Axes = int | Sequence[Any]


def by_argument(in_axes: Axes, count: int) -> tuple[Any, ...]:
    """Return the entry of `in_axes` for each of the arguments that are split.

    Raises:
        InputError: the number of entries is not the number of arguments.

    Examples:
        >>> by_argument(1, 2), by_argument((0, {"x": 1, "y": None}), 2)
        ((1, 1), (0, {'x': 1, 'y': None}))
    """
    if isinstance(in_axes, int):
        return (in_axes,) * count
    if len(in_axes) != count:
        raise InputError(
            f"in_axes={in_axes!r} has {len(in_axes)} entries, but {count} arguments are split. Pass an int "
            "for all, or one entry for each of batch_argnums, then of batch_argnames."
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
            f"in_axes={in_axes!r} is not an int, list or tuple. Pass an int for all arguments that are "
            'split, or one entry for each, as in in_axes=(1, {"x": 0, "table": None}).'
        )
    return in_axes


def axes_of(entry: Any, value: Any, label: str) -> list[int | None]:
    """Return the axis of the rows in each leaf of an argument; None for a leaf that is not split.

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

    axes: list[int | None] = []

    def below(axis: Any, part: Any) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            axes.append(None if axis is None else _axis(axis, leaf, label + jax.tree_util.keystr(path)))

    try:
        jax.tree.map(below, entry, value, is_leaf=is_none)
    except (ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise  # from `_axis`: it names the leaf
        # JAX's own text is about "custom node types" and prefixes, not about in_axes.
        raise InputError(
            f"The entry {entry!r} of in_axes does not have the structure of {label}. Pass an int, None, or a "
            f"tree prefix of {label}, as for jax.vmap."
        ) from error
    return axes


def _axis(axis: Any, leaf: Any, label: str) -> int:
    dimensions = len(getattr(leaf, "shape", ()))
    if not dimensions:
        return 0  # a scalar has no axis; every micro-batch gets it as it is
    if isinstance(axis, int) and not isinstance(axis, bool) and -dimensions <= axis < dimensions:
        return axis % dimensions
    raise InputError(
        f"in_axes has the axis {axis!r} for {label} of shape {tuple(leaf.shape)}. Pass an axis from "
        f"{-dimensions} to {dimensions - 1}, or None for an array that every micro-batch gets whole."
    )


def rows_of(array: Any, rows: Any, axis: int) -> Any:
    """Return rows of an array, or of an array of random keys, along an axis.

    Examples:
        >>> import numpy as np
        >>> rows_of(np.arange(6).reshape(2, 3), [2, 0], 1).tolist()
        [[2, 0], [5, 3]]
    """
    # Not `np.take`: it does not support random keys.
    return array[(*[slice(None)] * axis, rows)]
