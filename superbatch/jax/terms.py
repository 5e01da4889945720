# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Several losses ("terms") of one function, each with its own reduction and weight.

Term t has the value ``l_ti`` and the weight ``w_ti`` in micro-batch i, and the total weight ``W_t``, the sum
over micro-batches and devices::

    L = sum_t sum_i (w_ti / W_t) l_ti          ("sum":  l_ti / W_t)

Every ``W_t`` is computed before the loop, so that each micro-batch needs one backward, and all terms share
one sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import arithmetic, loop
from .loop import Arguments, Body, Call, PerMicrobatch, select_state
from .options import refuse_with_terms
from .outcome import Outcome
from .sharding import summed
from .splitting import Group
from .state import next_state

ByTerm = dict[str, Any]


class Plan(NamedTuple):
    """Constants of the loop for several terms.

    Attributes:
        totals: ``W_t`` of each term, over all devices.
        apart: whether to differentiate each term separately, because a loss is bfloat16 or float16.
    """

    totals: ByTerm
    apart: bool


class Result(NamedTuple):
    """Result of a window with several terms.

    Attributes:
        loss: the sum of the terms that have weight; NaN if none has.
        losses: the loss of each term; NaN for one without weight.
        weight: 1, or 0 if no term has weight.
        samples: the samples of the micro-batches that contribute to a term.
        gradient: the gradient of `loss`.
    """

    loss: Any
    losses: ByTerm
    weight: Any
    samples: Any
    gradient: Any


def plan_of(call: Call) -> Plan | None:
    """Return the plan with the total weights of the terms; None if the function returns one loss.

    Returned weights cost the part of a forward on which they depend: XLA removes the rest.

    Raises:
        InputError: an option of the call excludes several terms.
    """
    options = call.options
    if not options.terms and not options.form.returned:
        return None
    carry = loop.first_carry(call)
    first = call.groups[0]
    # With weight="returned" only the result of the function shows whether it has one loss or several.
    shape: Outcome = jax.eval_shape(lambda: call.evaluate(call.cutter(first)(0, carry)).without_aux())
    if not shape.has_terms:
        return None
    refuse_with_terms(options)

    def body_of(group: Group) -> Body:
        arguments_of = call.cutter(group)

        def body(carry: Any, index: Any) -> tuple[Any, Any]:
            arguments = arguments_of(index, carry)
            if not (options.form.returned or options.form.with_weight):
                return carry, arguments.weight  # declared weights need no call of the function
            outcome = call.evaluate(arguments)
            new = next_state(outcome.carry, carry, alone=call.count == 1)
            return select_state(new, carry, _takes_part(call, outcome.weight)), outcome.weight

        return body

    # A loop of its own before the one with the backwards: only its weights are used.
    _, stacked = loop.run_call(call, body_of, carry)
    totals = {
        name: arithmetic.total_weight(jnp.concatenate([group[name] for group in stacked]))
        for name in shape.loss
    }
    # The loss that is differentiated has the dtype of the terms; in bfloat16 the factors `w / W` would be
    # rounded.
    low = any(jnp.finfo(loss.dtype).bits < 32 for loss in shape.loss.values())
    return Plan(summed(totals, options.axis_name), low)


def _takes_part(call: Call, weights: ByTerm) -> Any:
    """Return True if a micro-batch contributes to any term."""
    each = [
        arithmetic.takes_part(weight, call.options.reduction_of(name)) for name, weight in weights.items()
    ]
    return reduce(jnp.logical_or, each)


def share(weight: Any, total: Any, reduction: str) -> Any:
    """Return the factor of a micro-batch's loss: ``w / W``, or ``1 / W`` for a sum; 0 if ``W`` is 0.

    Examples:
        >>> print(share(jnp.int32(1), jnp.float32(4), "mean"), share(jnp.int32(1), jnp.float32(0), "sum"))
        0.25 0.0
    """
    # 0, not infinity: a term without weight in the whole window is not part of the loss.
    one = weight.astype(total.dtype) if reduction == "mean" else jnp.ones((), total.dtype)
    return jnp.where(total == 0, 0, one / jnp.where(total == 0, 1, total))


def body(call: Call, group: Group, plan: Plan) -> Body:
    """Return the body of the loop: it adds the gradient of ``sum_t (w_ti / W_t) l_ti`` to the sums."""
    arguments_of, positions = call.cutter(group), call.roles.differentiated

    def one(state: Any, index: Any) -> tuple[Any, PerMicrobatch]:
        sums, carry = state
        arguments = arguments_of(index, carry)

        def outcome_of(*positional: Any) -> Outcome:
            return call.evaluate(Arguments(positional, arguments.named, arguments.weight))

        def objective(*positional: Any) -> tuple[Any, Outcome]:
            outcome = outcome_of(*positional)
            factors = _factors(call, plan, outcome.weight)
            parts = [factors[name].astype(loss.dtype) * loss for name, loss in outcome.loss.items()]
            return reduce(jnp.add, parts), outcome

        def wide(gradient: Any) -> Any:
            return jax.tree.map(lambda leaf, total: leaf.astype(total.dtype), gradient, sums)

        def each_apart(weights: ByTerm) -> Any:
            """Differentiate each term separately, and leave the gradients of terms without weight out.

            The mean over nothing is NaN, and in a gradient of the sum of terms 0 x NaN would remain.
            """
            part, losses = jax.tree.map(jnp.zeros_like, sums), {}
            factors = _factors(call, plan, weights)
            for name, weight in weights.items():
                keep = arithmetic.takes_part(weight, call.options.reduction_of(name))
                keep = keep & (plan.totals[name] != 0)
                own = loop.guarded(call, arguments, keep).positional
                losses[name], gradient = jax.value_and_grad(_loss_of(outcome_of, name), positions)(*own)
                part = jax.tree.map(partial(_added, factor=factors[name], keep=keep), part, gradient)
            return part, losses

        if plan.apart:  # a forward for each term; XLA merges them
            outcome = outcome_of(*arguments.positional)
            part, losses = each_apart(outcome.weight)
        else:
            together = arguments
            idle = [name for name in plan.totals if call.options.weight_of(name) is not None]
            if idle and not (call.options.form.returned or call.options.form.with_weight):
                together = loop.guarded(call, arguments, _all_count(arguments.weight, idle))
            differentiated = jax.value_and_grad(objective, positions, has_aux=True)
            (_, outcome), gradient = differentiated(*together.positional)
            part, losses = wide(gradient), outcome.loss
            # If a term has no weight in this micro-batch, the gradient of the sum is NaN. Whether it has is
            # known only when the program runs, so the program needs both branches.
            if idle:
                every, weights = _all_count(outcome.weight, idle), outcome.weight
                part, losses = lax.cond(every, lambda: (part, losses), lambda: each_apart(weights))
        keep = _takes_part(call, outcome.weight)
        result = PerMicrobatch(losses, outcome.weight, keep, outcome.aux, None)
        new = next_state(outcome.carry, carry, alone=call.count == 1)
        return (jax.tree.map(jnp.add, sums, part), select_state(new, carry, keep)), result

    return one


def _all_count(weights: ByTerm, names: list[str]) -> Any:
    return reduce(jnp.logical_and, [weights[name] != 0 for name in names])


def _factors(call: Call, plan: Plan, weights: ByTerm) -> ByTerm:
    return {
        name: share(weight, plan.totals[name], call.options.reduction_of(name))
        for name, weight in weights.items()
    }


def _loss_of(outcome_of: Callable[..., Outcome], name: str) -> Callable[..., Any]:
    return lambda *positional: outcome_of(*positional).loss[name]


def _added(total: Any, leaf: Any, *, factor: Any, keep: Any) -> Any:
    return total + arithmetic.weighted(leaf, total.dtype, factor, keep)


def finished(call: Call, plan: Plan, sums: Any, by_group: list[PerMicrobatch]) -> Result:
    """Reduce once over devices, and return the result of the window.

    A term without weight in the whole window is not part of the loss. If no term has weight, the loss is NaN
    and the gradient zero.
    """
    names = list(plan.totals)
    # One vector, so that a single reduction over devices is enough for scalars and gradients.
    vector = jnp.stack([*(_sum_of(call, name, by_group) for name in names), _samples(call, by_group)])
    sums, vector = summed((sums, vector), call.options.axis_name)
    losses = {
        name: arithmetic.per_weight(one, plan.totals[name])
        for name, one in zip(names, vector[:-1], strict=True)
    }
    counting = jnp.stack([plan.totals[name] != 0 for name in names])
    weight = jnp.any(counting).astype(vector.dtype)
    together = jnp.sum(jnp.where(counting, jnp.stack([losses[name] for name in names]), 0))
    dtype = jnp.result_type(*(by_group[0].loss[name].dtype for name in names))
    return Result(
        jnp.where(weight == 0, jnp.nan, together).astype(dtype),
        losses,
        weight,
        vector[-1],
        arithmetic.gradient_of(sums, weight, loop.chosen_of(call)),
    )


def _sum_of(call: Call, name: str, by_group: list[PerMicrobatch]) -> Any:
    """Return the sum of a term over the micro-batches of this device, see `arithmetic.loss_sum`."""
    weights = jnp.concatenate([group.weight[name] for group in by_group])
    losses = jnp.concatenate([group.loss[name] for group in by_group])
    reduction = call.options.reduction_of(name)
    dtype = jnp.promote_types(jnp.result_type(float), arithmetic.sum_dtype(losses.dtype))
    keep = arithmetic.takes_part(weights, reduction)
    return arithmetic.loss_sum(losses, weights, keep, reduction=reduction, dtype=dtype)


def _samples(call: Call, by_group: list[PerMicrobatch]) -> Any:
    """Return the number of samples of the micro-batches that contribute to a term."""
    keep = jnp.concatenate([group.keep for group in by_group])
    counts = jnp.asarray(loop.sizes(call.groups), jnp.result_type(float))
    return arithmetic.pairwise_sum(arithmetic.taking_part(counts, keep))
