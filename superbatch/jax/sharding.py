# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Axes of `jax.shard_map`: the type of arrays in the loop, and the single reduction after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ..errors import InputError

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
    """Mark arrays as varying over axes of `jax.shard_map`.

    If a parameter does not vary over devices, JAX reduces its gradient in every micro-batch. The gradient of
    a varying one stays on its device, to be reduced once after the loop. Axes of `jax.vmap` have no such
    types.

    Examples:
        >>> varying({"w": 1.0}, None)
        {'w': 1.0}
    """
    mapped = [name for name in names(axis_name) if name in jax.sharding.get_abstract_mesh().manual_axes]
    return jax.tree.map(lambda leaf: _cast(leaf, mapped), tree) if mapped else tree


def varying_like(tree: Any, other: Any) -> Any:
    """Mark arrays as varying over the axes of the arrays in another tree of the same structure.

    Parameters may also be sharded over an axis of the model; their gradients vary over it too.

    Examples:
        >>> varying_like({"w": 1.0}, {"w": 2.0})
        {'w': 1.0}
    """
    return jax.tree.map(lambda leaf, like: _cast(leaf, axes_of_type(like)), tree, other)


def axes_of_type(leaf: Any) -> tuple[str, ...]:
    """Return the axes of `jax.shard_map` over which an array varies, by its type.

    Examples:
        >>> axes_of_type(1.0)
        ()
    """
    type_of = jax.typeof(leaf)
    # `mat.varying` in new releases of JAX, `vma` in older ones.
    return tuple(sorted(type_of.mat.varying if hasattr(type_of, "mat") else type_of.vma))


def _cast(leaf: Any, axes: Sequence[str]) -> Any:
    known = axes_of_type(leaf)
    missing = tuple(name for name in axes if name not in known)
    return lax.pcast(leaf, missing, to="varying") if missing else leaf


def refuse_unbound(axis_name: AxisName) -> None:
    """Raise if an axis name is not bound where the function is called.

    Raises:
        InputError: it is not bound.

    Examples:
        >>> refuse_unbound(None)
    """
    for name in names(axis_name):
        # Here, as otherwise JAX would raise a NameError without a remedy from within the loop.
        try:
            lax.axis_size(name)
        except NameError as error:  # noqa: PERF203  (one or two axes)
            raise InputError(
                f"axis_name={axis_name!r}, but no axis {name!r} is bound where the function is called. Call "
                f"it inside jax.shard_map over a mesh with this axis, or jax.vmap(..., axis_name={name!r}), "
                "or leave axis_name out under jax.jit alone."
            ) from error


def summed(tree: Any, axis_name: AxisName) -> Any:
    """Return the sum over the devices of the axes, in one reduction for all leaves.

    Examples:
        >>> summed({"w": 1.0}, None)
        {'w': 1.0}
    """
    return lax.psum(tree, names(axis_name)) if names(axis_name) else tree


def key_of_device(key: Any, axis_name: AxisName) -> Any:
    """Return a random key folded with the index of the device on each axis.

    Examples:
        >>> key_of_device("unchanged", None)
        'unchanged'
    """
    for name in names(axis_name):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key
