# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""One reduction for each update: sums stay on their device until the loop has ended."""

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
    """Mark arrays as differing between the devices of an axis of `jax.shard_map`.

    The gradient with respect to a parameter that is known to be the same on every device is reduced at once,
    in every micro-batch. With respect to a parameter that may differ it is not. For an axis of `jax.vmap`
    there are no such types.

    Examples:
        >>> varying({"w": 1.0}, None)
        {'w': 1.0}
    """
    mapped = [name for name in names(axis_name) if name in jax.sharding.get_abstract_mesh().manual_axes]
    return jax.tree.map(lambda leaf: _cast(leaf, mapped), tree) if mapped else tree


def varying_like(tree: Any, other: Any) -> Any:
    """Mark arrays as differing between devices where those of another tree of the same structure do.

    Parameters may be spread over an axis of the model, beside that of the batch: so are their gradients.

    Examples:
        >>> varying_like({"w": 1.0}, {"w": 2.0})
        {'w': 1.0}
    """
    return jax.tree.map(lambda leaf, like: _cast(leaf, axes_of_type(like)), tree, other)


def axes_of_type(leaf: Any) -> tuple[str, ...]:
    """Return the axes of `jax.shard_map` over which an array is known to differ.

    Examples:
        >>> axes_of_type(1.0)
        ()
    """
    type_of = jax.typeof(leaf)
    # `vma` in older releases.
    return tuple(sorted(type_of.mat.varying if hasattr(type_of, "mat") else type_of.vma))


def _cast(leaf: Any, axes: Sequence[str]) -> Any:
    known = axes_of_type(leaf)
    missing = tuple(name for name in axes if name not in known)
    return lax.pcast(leaf, missing, to="varying") if missing else leaf


def refuse_unbound(axis_name: AxisName) -> None:
    """Refuse an axis name that is not bound where the function is called.

    Raises:
        InputError: no such axis is bound.

    Examples:
        >>> refuse_unbound(None)
    """
    for name in names(axis_name):
        # JAX raises a NameError without a remedy, from within the loop.
        try:
            lax.axis_size(name)
        except NameError as error:  # noqa: PERF203  (one or two axes)
            raise InputError(
                f"axis_name={axis_name!r}, and there is no axis {name!r} where the function is called. Call "
                f"it inside jax.shard_map over a mesh with this axis, or jax.vmap(..., axis_name={name!r}). "
                "Under jax.jit alone leave axis_name out."
            ) from error


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
