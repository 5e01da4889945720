# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Error for a loss that reduces over devices itself, though `axis_name` already reduces after the loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from ..errors import LossSpecError
from .loop import Call, first_carry
from .programs import needed, within
from .sharding import names

_NO_REDUCTIONS = ("axis_index", "pvary", "pcast")  # they name an axis, but reduce nothing over it


def refuse_own_reductions(call: Call) -> None:
    """Raise if the loss depends on a collective over an axis of `axis_name`.

    The second reduction would divide the gradient by the number of devices. Collectives in aux and in a state
    are allowed.

    Raises:
        LossSpecError: the loss depends on a collective.
    """
    axes = names(call.options.axis_name)
    if not axes:
        return
    arguments_of, carry = call.cutter(call.groups[0]), first_carry(call)
    # Trace the loss alone: a metric in aux may be averaged over devices.
    program = jax.make_jaxpr(lambda: call.evaluate(arguments_of(0, carry)).loss)()
    for primitive, axis in _collectives(needed(program.jaxpr)[0]):
        if axis in axes:
            raise LossSpecError(
                f"The loss reduces over the axis {axis!r} itself ({primitive}), but axis_name={axis!r} "
                "reduces loss and gradient once more after the loop. Remove jax.lax.pmean, psum or "
                "all_gather from the function, so that it returns the loss of the device's own rows, or pass "
                "check=False for synchronised BatchNorm."
            )


def _collectives(equations: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield primitive and axis of each collective, also of those in inner programs."""
    for equation in equations:
        name = equation.primitive.name
        if name not in _NO_REDUCTIONS:
            axes = equation.params.get("axes", equation.params.get("axis_name", ()))
            for axis in axes if isinstance(axes, tuple | list) else (axes,):
                yield name, axis
        for program in within(equation):
            yield from _collectives(program.eqns)
