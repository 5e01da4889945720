# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Parsing of the result of the user's function for a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..errors import LossSpecError
from . import arithmetic


class Form(NamedTuple):
    """Declared form of the result of the user's function.

    Attributes:
        returned: whether it returns ``(loss, weight)``, or a mapping from names to such pairs.
        has_aux: whether it returns aux.
        has_carry: whether it returns a state for the next micro-batch.
        terms: the declared names of several losses; empty without.
        with_weight: the names for which it returns ``(loss, weight)``.
    """

    returned: bool
    has_aux: bool
    has_carry: bool
    terms: tuple[str, ...] = ()
    with_weight: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """Parsed result for one micro-batch.

    Attributes:
        loss: a scalar; for several losses a dict by name.
        weight: the returned weight, in the same form. None if it is declared; a dict lacks declared weights.
        aux: the aux, or None.
        carry: the state for the next micro-batch, or None.
    """

    loss: Any
    weight: Any
    aux: Any
    carry: Any

    @property
    def has_terms(self) -> bool:
        """Return True if there are several losses by name."""
        return isinstance(self.loss, dict)

    def weighing(self, weight: Any) -> Outcome:
        """Return the same outcome with another weight."""
        return Outcome(self.loss, weight, self.aux, self.carry)

    def without_aux(self) -> Outcome:
        """Return the same outcome without `aux`."""
        return Outcome(self.loss, self.weight, None, self.carry)


def read(result: Any, form: Form) -> Outcome:
    """Parse a result into loss, weight, aux and state.

    Raises:
        LossSpecError: the result does not have the declared form.

    Examples:
        >>> outcome = read(((6.0, 3), "aux"), Form(returned=True, has_aux=True, has_carry=False))
        >>> float(outcome.loss), int(outcome.weight), outcome.aux
        (6.0, 3, 'aux')
        >>> read({"rows": (6.0, 3)}, Form(returned=True, has_aux=False, has_carry=False)).loss["rows"].item()
        6.0
    """
    head, aux, carry = result, None, None
    if form.has_aux or form.has_carry:
        wanted = "Return (loss, aux)" if form.has_aux else "Return (loss, state)"
        head, second = _parts(result, (2,), "has_aux or carry_argnum is given", wanted)
        if form.has_aux and form.has_carry:
            aux, carry = _parts(
                second, (2,), "has_aux and carry_argnum are both given", "Return (loss, (aux, state))"
            )
        else:
            aux, carry = (second, None) if form.has_aux else (None, second)
    if form.terms or (form.returned and isinstance(head, Mapping)):
        return Outcome(*_terms(head, form), aux, carry)
    weight = None
    if form.returned:
        wanted = "Return (loss, weight), or a mapping from names to such pairs"
        head, weight = _parts(head, (2,), 'weight="returned" is given', wanted)
        weight = arithmetic.as_weight(weight, "the returned weight")
    elif isinstance(head, Mapping):
        raise LossSpecError(
            f"The function returns a mapping with the losses {list(head)}, but one loss is declared. Declare "
            "the weight of each, as in "
            f'weight={{{next(iter(head), "name")!r}: None, ...}}, or pass weight="returned" and return '
            "(loss, weight) for each name."
        )
    return Outcome(_scalar(head, "loss"), weight, aux, carry)


def _terms(head: Any, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the losses and the returned weights, both by name."""
    if not isinstance(head, Mapping):
        raise LossSpecError(
            f"The function returns a {type(head).__name__}, but the losses {list(form.terms)} are declared. "
            "Return a mapping from these names to losses."
        )
    names = form.terms or tuple(head)
    if set(head) != set(names) or not head:
        raise LossSpecError(
            f"The function returns the losses {list(head)}, but the declared losses are {list(names)}. "
            "Return the declared names for every micro-batch, or declare the other names in weight=."
        )
    losses, weights = {}, {}
    for name in sorted(names):  # as JAX orders the keys of a dict
        loss = head[name]
        if form.returned or name in form.with_weight:
            if not isinstance(loss, tuple | list) or len(loss) != 2:
                raise LossSpecError(
                    f'The weight of {name!r} is declared as "returned", but the function returns no weight '
                    f"for it. Return (loss, weight) for {name!r}."
                )
            loss, weight = loss
            weights[name] = arithmetic.as_weight(weight, f"the returned weight of the term {name!r}")
        losses[name] = _scalar(loss, f"loss of the term {name!r}")
    return losses, weights


def _parts(value: Any, lengths: tuple[int, ...], why: str, do: str) -> tuple[Any, ...]:
    if isinstance(value, tuple | list) and len(value) in lengths:
        return tuple(value)
    given = f" of {len(value)} entries" if isinstance(value, tuple | list) else ""
    raise LossSpecError(f"The function returns a {type(value).__name__}{given}, but {why}. {do}.")


def _scalar(value: Any, what: str) -> Any:
    array = jnp.asarray(value) if isinstance(value, int | float) or hasattr(value, "dtype") else None
    if array is not None and array.shape == () and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    kind = f"type {type(value).__name__}"
    given = kind if array is None else f"shape {array.shape} and dtype {array.dtype}"
    raise LossSpecError(
        f"The function returns a {what} of {given}, not a floating-point scalar. Return one, such as "
        "jnp.mean(losses)."
    )
