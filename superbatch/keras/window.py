# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Arithmetic of one update: gradient and loss of the batch from the terms of its micro-batches.

With the value ``l_ij`` and the weight ``w_ij`` of term j in micro-batch i, the sum ``W_j`` of these weights
over the batch, the factor ``f_j`` of the term, and the regularizers R of the model's weights::

    L = sum_j f_j sum_i (w_ij / W_j) l_ij  +  R

A weight from a mask is known only after the forward. If there is one such term and no other, ``w_i l_i`` is
summed, and the gradient is divided by ``W`` once at the end. With several terms every ``W_j`` must be known
before the first backward. Then a first pass over the batch computes the masks and counts the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops

from ..errors import InputError
from . import arithmetic
from .options import Options
from .rowwise import Numbers
from .terms import Kind, Term


class Plan(NamedTuple):
    """Procedure for a batch; the same for all batches with the same shapes and dtypes.

    Attributes:
        kinds: the kind of each term.
        factors: the factor of each term in the total.
        stated: for each term, whether its weight comes from `loss_weight=`.
        numbers: for each term, the shape of the loss's numbers before reduction, when the plan was made.
        counting: whether a first pass over the batch counts the weights.
        dtype: the dtype of loss sums and weights.
        skips: whether micro-batches that are not finite are left out.
    """

    kinds: tuple[Kind, ...]
    factors: tuple[Any, ...]
    stated: tuple[bool, ...]
    numbers: tuple[Numbers | None, ...]
    counting: bool
    dtype: str
    skips: bool

    @property
    def afterwards(self) -> bool:
        """Return True if the gradient is divided after the loop, by the weight that the loop summed."""
        return self.kinds == ("counted",) and not self.counting

    @property
    def may_be_empty(self) -> bool:
        """Return True if a micro-batch, or a whole batch, may have weight 0."""
        return self.skips or set(self.kinds) == {"counted"}

    def may_be_empty_beside_others(self, number: int) -> bool:
        """Return True if a term may be 0 / 0 in a micro-batch in which other terms have weight."""
        return self.stated[number] and len(self.kinds) > 1

    @property
    def length(self) -> int:
        """Length of the vector of sums: a loss and a weight for each term, and the rows that took part."""
        return 2 * len(self.kinds) + 1


def plan_of(terms: list[Term], options: Options, *, scaled: bool) -> Plan:
    """Make the plan from the terms of one micro-batch, which may be symbolic.

    Args:
        terms: the terms of one micro-batch.
        options: the arguments of `accumulate`.
        scaled: whether the optimizer scales the loss against underflow.

    Raises:
        InputError: ``nonfinite="skip_microbatch"`` cannot be combined with this loss or optimizer.
    """
    kinds = tuple(term.kind for term in terms)
    # A scaled loss is divided before the backward: a sum of scaled losses of tokens would overflow.
    counting = "counted" in kinds and (len(kinds) > 1 or scaled)
    if options.nonfinite == "skip_microbatch":
        if counting or len(set(kinds)) > 1:
            raise InputError(
                'nonfinite="skip_microbatch" does not work with this loss, because the divisors of its terms '
                "are fixed before it is known which micro-batches are left out: "
                f"{', '.join(f'{term.name} ({term.kind})' for term in terms)}. Use "
                'nonfinite="propagate".'
            )
        if scaled:
            raise InputError(
                'nonfinite="skip_microbatch" hides the overflows by which a LossScaleOptimizer finds its '
                'scale. Use nonfinite="propagate": the optimizer skips updates that are not finite.'
            )
    dtypes = [str(arithmetic.wide(term.value.dtype)) for term in terms]
    dtype = "float64" if "float64" in dtypes else "float32"
    skips = options.nonfinite == "skip_microbatch"
    factors = tuple(term.factor for term in terms)
    stated, numbers = tuple(term.stated for term in terms), tuple(term.numbers for term in terms)
    return Plan(kinds, factors, stated, numbers, counting, dtype, skips)


def totals_of(plan: Plan, rows: Any, counted: Any) -> list[Any]:
    """Return the divisor ``W_j`` of each term in the backward; 1 if the gradient is divided after the loop.

    Args:
        plan: the plan for the batch.
        rows: the rows of the batch on all devices.
        counted: the vector of sums of the counting pass, or None without one.
    """
    one = ops.ones((), plan.dtype)
    divisors = {"rows": ops.cast(rows, plan.dtype), "sum": one}
    terms = len(plan.kinds)
    return [
        divisors[kind] if kind != "counted" else one if counted is None else counted[terms + number]
        for number, kind in enumerate(plan.kinds)
    ]


def objective(terms: list[Term], totals: list[Any], plan: Plan) -> Any:
    """Return the scalar to differentiate: the gradients of all micro-batches add up to that of the batch."""
    parts = []
    for term, total in zip(terms, totals, strict=True):
        share = arithmetic.scale(ops.cast(term.weight, plan.dtype), total)
        value = ops.cast(term.value, plan.dtype)
        parts.append(arithmetic.taking_part(value, share) * share * term.factor)
    return sum(parts[1:], start=parts[0])


def contribution(terms: list[Term], rows: Any, plan: Plan) -> Any:
    """Return the vector of a micro-batch: ``w l`` of each term, ``w`` of each term, and the rows."""
    weights = [ops.cast(term.weight, plan.dtype) for term in terms]
    losses = [
        arithmetic.taking_part(ops.cast(term.value, plan.dtype), weight) * weight
        for term, weight in zip(terms, weights, strict=True)
    ]
    return ops.stack([*losses, *weights, ops.cast(rows, plan.dtype)])


def counts(sums: Any, plan: Plan) -> Any:
    """Return True if a term has a weight other than 0 in the vector of a micro-batch or batch."""
    terms = len(plan.kinds)
    return ops.any(sums[terms : 2 * terms] != 0)


def kept(gradients: list[Any], part: Any, plan: Plan) -> Any | None:
    """Return a scalar that is False if a micro-batch is to be left out; None if none ever is.

    Args:
        gradients: the gradients of the micro-batch, dense tensors.
        part: its `contribution`.
        plan: the plan for the batch.
    """
    if not plan.may_be_empty:
        return None
    keep = counts(part, plan)
    if plan.skips:
        finite = [ops.all(ops.isfinite(tensor)) for tensor in [part, *gradients]]
        keep = ops.logical_and(keep, ops.all(ops.stack(finite)))
    return keep


def division(sums: Any, rows: Any, plan: Plan) -> Any | None:
    """Return the divisor of the summed gradients after the loop; None if they are divided already."""
    terms = len(plan.kinds)
    if plan.afterwards:
        return sums[terms]
    # The backward divided by all rows; the mean is over those that were not skipped.
    if plan.skips and "rows" in plan.kinds:
        return arithmetic.per_weight(sums[2 * terms], ops.cast(rows, plan.dtype))
    return None


def divided(gradient: Any, divisor: Any | None, dtype: Any) -> Any:
    """Return a summed gradient over its divisor, in the dtype of its variable; 0 if the divisor is 0."""
    if divisor is not None:
        gradient = arithmetic.per_weight(gradient, ops.cast(divisor, gradient.dtype))
    return ops.cast(gradient, dtype)


def losses_of(sums: Any, plan: Plan) -> list[Any]:
    """Return the loss of the batch for each term, without its factor."""
    terms = len(plan.kinds)
    return [
        sums[number] if kind == "sum" else arithmetic.per_weight(sums[number], sums[terms + number])
        for number, kind in enumerate(plan.kinds)
    ]


def total_loss(losses: list[Any], plan: Plan, regularization: Any | None) -> Any:
    """Return the total loss of the batch, with the factors of the terms and the regularizers."""
    parts = [loss * factor for loss, factor in zip(losses, plan.factors, strict=True)]
    if regularization is not None:
        parts.append(ops.cast(regularization, plan.dtype))
    return sum(parts[1:], start=parts[0])
