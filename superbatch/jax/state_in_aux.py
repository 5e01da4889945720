# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Error for a state in aux: the caller expects one state, but would get one for each micro-batch."""

from __future__ import annotations

from typing import Any

import jax

from ..errors import LossSpecError
from .loop import Call

_COLLECTION = "batch_stats"  # of flax's BatchNorm


def refuse_state_in_aux(aux: Any, call: Call) -> None:
    """Raise if aux is an updated state.

    Args:
        aux: the aux of the micro-batches, stacked: [count, ...].
        call: the call.

    Raises:
        LossSpecError: a part of aux is named ``batch_stats``, or aux has the structure and shapes of an
            argument that is the same for all micro-batches.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(aux)[0]]
    names = {getattr(key, "key", getattr(key, "name", None)) for path in paths for key in path}
    if _COLLECTION in names:
        raise _refused(f"aux holds {_COLLECTION!r}")
    form = jax.tree.structure(aux)
    shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(aux)]
    if not any(shapes) or form == jax.tree.structure(0):  # scalars, or a single array: no state
        return
    for argument in call.roles.others:
        if argument.changes or jax.tree.structure(argument.value) != form:
            continue
        if [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(argument.value)] == shapes:
            raise _refused(
                f"aux has the names and shapes of the argument {argument.name or argument.where!r}"
            )


def _refused(reason: str) -> LossSpecError:
    return LossSpecError(
        f"{reason}, so it is a state, but aux is not passed on to the next micro-batch. "
        "Pass the state by position, pass this position as carry_argnum= and return (loss, state), or "
        "(loss, (aux, state)) with has_aux; or pass check=False to stack aux nevertheless."
    )
