# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""One reduction for each update: what differs between devices stays on its device until the loop is over."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

AxisName = str | tuple[str, ...] | None


def names(axis_name: AxisName) -> tuple[str, ...]:
    """Return the mesh axes as a tuple.

    Examples:
        >>> names("data"), names(None)
        (('data',), ())
    """
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def varying(tree: Any, axis_name: AxisName) -> Any:
    """Mark arrays as differing between the devices of an axis of `jax.shard_map`.

    The gradient with respect to a parameter that is known to be the same on every device is reduced at once,
    in every micro-batch. With respect to a parameter that may differ it is not. For an axis of `jax.vmap`
    there are no such types.

    Examples:
        >>> varying({"w": 1.0}, None)
        {'w': 1.0}
    """
    mapped = [name for name in names(axis_name) if name in jax.sharding.get_abstract_mesh().manual_axes]

    def one(leaf: Any) -> Any:
        type_of = jax.typeof(leaf)
        known = type_of.mat.varying if hasattr(type_of, "mat") else type_of.vma  # as older releases call it
        missing = tuple(name for name in mapped if name not in known)
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree) if mapped else tree


def summed(tree: Any, axis_name: AxisName) -> Any:
    """Return the sum over the devices of an axis: all leaves in one reduction.

    Examples:
        >>> summed({"w": 1.0}, None)
        {'w': 1.0}
    """
    return lax.psum(tree, names(axis_name)) if names(axis_name) else tree


def key_of_device(key: Any, axis_name: AxisName) -> Any:
    """Return another random key on each device of the axis.

    Examples:
        >>> key_of_device("unchanged", None)
        'unchanged'
    """
    for name in names(axis_name):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key
