# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Arguments of one micro-batch: its rows of the batch, and its random keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .roles import Argument, is_key
from .sharding import AxisName, key_of_device
from .splitting import Group, Layout, cutter


def fold_in(key: Any, data: Any) -> Any:
    """Like `jax.random.fold_in`, also for arrays of keys.

    Examples:
        >>> fold_in(jax.random.split(jax.random.key(0), 3), 1).shape
        (3,)
    """
    if not is_key(key) or not key.shape:
        return jax.random.fold_in(key, data)
    folded = jax.vmap(lambda one: jax.random.fold_in(one, data))(key.reshape(-1))
    return folded.reshape(key.shape)


def part_of(argument: Argument, group: Group, layout: Layout, axis_name: AxisName) -> Callable[[Any], Any]:
    """Return a function from the index of a micro-batch in its group to its part of an argument.

    Examples:
        >>> argument = Argument(1, "x", jax.numpy.arange(6), True, ("rows",), (0,))
        >>> part = part_of(argument, Group(count=3, size=2, start=0, first=0), "contiguous", None)
        >>> part(1).tolist()
        [2, 3]
    """
    if not argument.changes:
        return lambda index: argument.value  # the same for every micro-batch
    leaves, structure = jax.tree.flatten(argument.value)
    pairs = list(zip(leaves, argument.modes, strict=True))
    axes = [axis for axis, mode in zip(argument.axes, argument.modes, strict=True) if mode == "rows"]
    cut = cutter([leaf for leaf, mode in pairs if mode == "rows"], group, layout, axes)
    keys = [key_of_device(leaf, axis_name) for leaf, mode in pairs if mode == "key"]

    def part(index: Any) -> Any:
        rows, own = iter(cut(index)), iter(keys)
        parts = {
            "rows": lambda leaf: next(rows),
            "key": lambda leaf: fold_in(next(own), group.first + index),
        }
        return structure.unflatten([parts.get(mode, lambda leaf: leaf)(leaf) for leaf, mode in pairs])

    return part
