# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Result of the user's function for a micro-batch, read in one place."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..errors import LossSpecError, explain
from . import arithmetic


class Form(NamedTuple):
    """Declared form of the function's result.

    Attributes:
        returned: the loss comes with its weight: ``(loss, weight)`` or ``(loss, weight, extra)``.
        has_aux: a second value comes with the loss.
        has_carry: a state comes back, for the next micro-batch.
    """

    returned: bool
    has_aux: bool
    has_carry: bool


class Outcome(NamedTuple):
    """One micro-batch: scalars `loss`, `weight` and `extra` (None where not returned), `aux` and `carry`."""

    loss: Any
    weight: Any
    extra: Any
    aux: Any
    carry: Any

    def weighing(self, weight: Any) -> Outcome:
        """Return the same outcome with another weight."""
        return Outcome(self.loss, weight, self.extra, self.aux, self.carry)

    def without_aux(self) -> Outcome:
        """Return the same outcome without `aux`."""
        return Outcome(self.loss, self.weight, self.extra, None, self.carry)


def read(result: Any, form: Form) -> Outcome:
    """Take the result of the function apart.

    Raises:
        LossSpecError: it is not of the stated form.

    Examples:
        >>> outcome = read(((6.0, 3), "aux"), Form(returned=True, has_aux=True, has_carry=False))
        >>> float(outcome.loss), int(outcome.weight), outcome.extra, outcome.aux
        (6.0, 3, None, 'aux')
    """
    head, aux, carry = result, None, None
    if form.has_aux or form.has_carry:
        head, second = _parts(result, (2,), "has_aux or carry_argnum is given", "return (loss, aux)")
        if form.has_aux and form.has_carry:
            aux, carry = _parts(second, (2,), "both has_aux and carry_argnum", "return (loss, (aux, carry))")
        else:
            aux, carry = (second, None) if form.has_aux else (None, second)
    weight = extra = None
    if form.returned:
        wanted = "return (loss, weight) or (loss, weight, extra)"
        head, weight, *rest = _parts(head, (2, 3), 'weight="returned" is given', wanted)
        weight = arithmetic.as_weight(weight, "the returned weight")
        extra = _scalar(rest[0], "extra term") if rest else None
    return Outcome(_scalar(head, "loss"), weight, extra, aux, carry)


def _parts(value: Any, lengths: tuple[int, ...], why: str, do: str) -> tuple[Any, ...]:
    if isinstance(value, tuple | list) and len(value) in lengths:
        return tuple(value)
    raise LossSpecError(explain(f"a function that returns {type(value).__name__}", why, do))


def _scalar(value: Any, what: str) -> Any:
    array = jnp.asarray(value) if isinstance(value, int | float) or hasattr(value, "dtype") else None
    if array is not None and array.shape == () and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    given = type(value).__name__ if array is None else f"shape {array.shape} and dtype {array.dtype}"
    raise LossSpecError(
        explain(
            f"a {what} of {given}", "a gradient is that of one real number", "return a floating-point scalar"
        )
    )
