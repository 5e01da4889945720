# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""State that one micro-batch passes to the next; structure, shapes and dtypes must not change."""

from __future__ import annotations

from typing import Any

import jax

from ..errors import LossSpecError
from .sharding import varying_like


def next_state(new: Any, old: Any, *, alone: bool) -> Any:
    """Return the state for the next micro-batch, after a check of its form.

    Args:
        new: the state that the function returned.
        old: the state that the function was given.
        alone: True for a single micro-batch: no other one gets the state, so it is not checked.

    Raises:
        LossSpecError: the structure, a shape or a dtype differs from the state that the function was given.

    Examples:
        >>> import jax.numpy as jnp
        >>> next_state({"n": jnp.int32(2)}, {"n": jnp.int32(1)}, alone=False)["n"].item()
        2
    """
    if alone:
        return new
    # JAX's own error would be a TypeError about "scan" and "carry components".
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise LossSpecError(
            f"The function returns a state of the structure {jax.tree.structure(new)}, but was given "
            f"{jax.tree.structure(old)}. Return the same structure, or pass a first state with all entries."
        )
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    for (path, after), before in pairs:
        given_type, new_type = jax.typeof(before), jax.typeof(after)
        # A Python number is weakly typed: it takes the dtype of the other operand.
        same = given_type.dtype == new_type.dtype or given_type.weak_type or new_type.weak_type
        if given_type.shape != new_type.shape or not same:
            raise LossSpecError(
                f"The function returns state{jax.tree_util.keystr(path)} as {new_type.dtype} of shape "
                f"{new_type.shape}, but was given {given_type.dtype} of shape {given_type.shape}. Return the "
                f"same dtype and shape, as with new.astype({given_type.dtype.name!r})."
            )
    # If the function averaged the state over devices, its type no longer varies over them. The loop needs the
    # type of the old state.
    return varying_like(new, old)
