# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""The arithmetic of one update: how terms of micro-batches become the gradient and the loss of the batch.

With the weight ``w_ij`` of term j in micro-batch i, and ``W_j`` its sum over the batch::

    L = sum_j f_j sum_i (w_ij / W_j) l_ij  +  R(weights)

A weight that a mask decides is known after the forward. One such term alone is summed as ``w_i l_i``, and the
gradient divided by ``W`` once. Beside other terms its ``W_j`` has to be known first: the batch then goes
through the model twice, the first time only as far as its masks.
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
    """Procedure for one batch; the same for every batch of one form.

    Attributes:
        kinds: of the terms.
        factors: of the terms in the total.
        stated: whether the weight of each is what `loss_weight=` says.
        numbers: what each was reduced from, when it was inspected.
        counting: whether the weights are counted in a pass of their own.
        dtype: of loss sums and weights.
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
        """Return True if the gradient is divided after the loop, by the count that the loop made."""
        return self.kinds == ("counted",) and not self.counting

    @property
    def may_be_empty(self) -> bool:
        """Return True if a micro-batch, and a batch, may count nothing."""
        return self.skips or set(self.kinds) == {"counted"}

    def may_be_empty_beside_others(self, number: int) -> bool:
        """Return True if a term may be 0 / 0 in a micro-batch in which other terms count."""
        return self.stated[number] and len(self.kinds) > 1

    @property
    def length(self) -> int:
        """Of the vector of sums: a loss and a weight for each term, and the rows that took part."""
        return 2 * len(self.kinds) + 1


def plan_of(terms: list[Term], options: Options, *, scaled: bool) -> Plan:
    """Decide from the terms of one micro-batch, which may be symbolic.

    Args:
        terms: of one micro-batch.
        options: of `accumulate`.
        scaled: whether the loss is scaled against underflow: sums of it would overflow.

    Raises:
        InputError: micro-batches cannot be left out of such a loss.
    """
    kinds = tuple(term.kind for term in terms)
    counting = "counted" in kinds and (len(kinds) > 1 or scaled)
    if options.nonfinite == "skip_microbatch":
        if counting or len(set(kinds)) > 1:
            raise InputError(
                'nonfinite="skip_microbatch" sets the shares of several means before it knows what is left '
                f"out, and the loss has {', '.join(f'{term.name} ({term.kind})' for term in terms)}. Use "
                'nonfinite="propagate".'
            )
        if scaled:
            raise InputError(
                'nonfinite="skip_microbatch" hides the overflows by which a LossScaleOptimizer finds its '
                'scale. Use nonfinite="propagate": the optimizer leaves out updates that are not finite.'
            )
    dtypes = [str(arithmetic.wide(term.value.dtype)) for term in terms]
    dtype = "float64" if "float64" in dtypes else "float32"
    skips = options.nonfinite == "skip_microbatch"
    factors = tuple(term.factor for term in terms)
    stated, numbers = tuple(term.stated for term in terms), tuple(term.numbers for term in terms)
    return Plan(kinds, factors, stated, numbers, counting, dtype, skips)


def totals_of(plan: Plan, rows: Any, counted: Any) -> list[Any]:
    """Return the divisors of each term's weights before the backward.

    Args:
        plan: of the batch.
        rows: of the batch, on all devices.
        counted: the sums of a counting pass, or None.
    """
    one = ops.ones((), plan.dtype)
    known = {"rows": ops.cast(rows, plan.dtype), "sum": one}
    terms = len(plan.kinds)
    return [
        known[kind] if kind != "counted" else one if counted is None else counted[terms + number]
        for number, kind in enumerate(plan.kinds)
    ]


def objective(terms: list[Term], totals: list[Any], plan: Plan) -> Any:
    """Return the scalar of a micro-batch whose gradients add up to that of the batch."""
    parts = []
    for term, total in zip(terms, totals, strict=True):
        share = arithmetic.scale(ops.cast(term.weight, plan.dtype), total)
        value = ops.cast(term.value, plan.dtype)
        parts.append(arithmetic.taking_part(value, share) * share * term.factor)
    return sum(parts[1:], start=parts[0])


def contribution(terms: list[Term], rows: Any, plan: Plan) -> Any:
    """Return the contribution of a micro-batch to the vector of sums."""
    weights = [ops.cast(term.weight, plan.dtype) for term in terms]
    losses = [
        arithmetic.taking_part(ops.cast(term.value, plan.dtype), weight) * weight
        for term, weight in zip(terms, weights, strict=True)
    ]
    return ops.stack([*losses, *weights, ops.cast(rows, plan.dtype)])


def counts(sums: Any, plan: Plan) -> Any:
    """Return True if anything of a micro-batch or batch counts, by its sums."""
    terms = len(plan.kinds)
    return ops.any(sums[terms : 2 * terms] != 0)


def division(sums: Any, rows: Any, plan: Plan) -> Any | None:
    """Return the divisor of the summed gradients at the end; None for none."""
    terms = len(plan.kinds)
    if plan.afterwards:
        return sums[terms]
    if plan.skips and "rows" in plan.kinds:
        return arithmetic.per_weight(sums[2 * terms], ops.cast(rows, plan.dtype))
    return None


def divided(gradient: Any, divisor: Any | None, dtype: Any) -> Any:
    """Return a summed gradient divided, in the dtype of its variable; 0 where nothing counted."""
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
    """Return the loss of the batch."""
    parts = [loss * factor for loss, factor in zip(losses, plan.factors, strict=True)]
    if regularization is not None:
        parts.append(ops.cast(regularization, plan.dtype))
    return sum(parts[1:], start=parts[0])
