# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Check that every leaf of the differentiated arguments has a gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import InputError
from .roles import is_array


def refuse_what_has_no_gradient(position: int, argument: Any) -> None:
    """Raise for leaves that cannot be differentiated: counters, random keys and functions of a module.

    Args:
        position: the position of the argument.
        argument: the argument.

    Raises:
        InputError: there is one; the text shows how to split a module of flax.nnx or Equinox.

    Examples:
        >>> refuse_what_has_no_gradient(0, {"w": jnp.ones(2), "scale": 1.0})
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(argument, is_leaf=_is_state_of_nnx):
        number = isinstance(leaf, float | complex)
        is_state = _is_state_of_nnx(leaf)
        if not is_state and (number or (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))):
            continue
        what = f"a {type(leaf).__name__}" if is_state or not is_array(leaf) else f"of dtype {leaf.dtype}"
        raise InputError(
            f"argument {position}{jax.tree_util.keystr(path)} is {what}, which has no gradient. Pass the "
            "parameters alone: with flax.nnx, graphdef, params, rest = nnx.split(model, nnx.Param, ...), and "
            "in the function model = nnx.merge(graphdef, params, rest, copy=True); with Equinox, params, "
            "rest = eqx.partition(model, eqx.is_inexact_array), and model = eqx.combine(params, rest)."
        )


def _is_state_of_nnx(node: Any) -> bool:
    """Return True for a variable of flax.nnx that the forward updates, such as running statistics.

    These are float arrays too. If they were differentiated, the optimizer would change them, and the updates
    of the forward would be lost.
    """
    # By name, so that flax need not be installed.
    kinds = [kind for kind in type(node).__mro__ if kind.__module__.startswith("flax.nnx")]
    return any(kind.__name__ in ("BatchStat", "Cache") for kind in kinds)
