# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The state that one micro-batch hands to the next, with names, shapes and dtypes that stay."""

from __future__ import annotations

from typing import Any

import jax

from ..errors import LossSpecError
from .sharding import varying_like


def next_state(new: Any, old: Any, *, alone: bool) -> Any:
    """Return the state that the function returned, for the next micro-batch.

    Args:
        new: as returned.
        old: as given.
        alone: True where there is no next micro-batch, so that any form will do.

    Raises:
        LossSpecError: its names, shapes or dtypes are not those of the given state.

    Examples:
        >>> import jax.numpy as jnp
        >>> next_state({"n": jnp.int32(2)}, {"n": jnp.int32(1)}, alone=False)["n"].item()
        2
    """
    if alone:
        return new
    # The loop of JAX would raise a TypeError about "scan" and "carry components".
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise LossSpecError(
            f"The state comes back with the structure {jax.tree.structure(new)}, and was given with "
            f"{jax.tree.structure(old)}. Return it with the names that it came with, or pass a first state "
            "that has all of them."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    for (path, after), before in pairs:
        known, found = jax.typeof(before), jax.typeof(after)
        # A Python number is weakly typed: it takes the dtype of the other operand.
        same = known.dtype == found.dtype or known.weak_type or found.weak_type
        if known.shape != found.shape or not same:
            raise LossSpecError(
                f"state{jax.tree_util.keystr(path)} comes back as {found.dtype} of shape {found.shape}, and "
                f"was given as {known.dtype} of shape {known.shape}. Return the dtype and shape that were "
                f"given, as with new.astype({known.dtype.name!r})."
            )
    # A state that the function averages over devices is known to be the same on all of them.
    return varying_like(new, old)
