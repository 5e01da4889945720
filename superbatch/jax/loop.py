# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The loop over the micro-batches of one window, inside the user's jitted update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import arithmetic
from .convolutions import for_loop
from .options import Options
from .outcome import Outcome, read
from .roles import Roles, fold_in, part_of
from .sharding import key_of_device, summed, varying
from .splitting import Group

Body = Callable[[Any, Any], tuple[Any, Any]]


class Planned(NamedTuple):
    """Weight and samples of the window, where they must be known before the loop."""

    weight: Any
    samples: Any


class PerMicrobatch(NamedTuple):
    """Results of the loop for every micro-batch, stacked; of a group: [count, ...]."""

    loss: Any
    weight: Any
    keep: Any
    extra: Any
    aux: Any
    square: Any


class Arguments(NamedTuple):
    """Arguments of the function for one micro-batch, and the micro-batch's declared weight."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    weight: Any


@dataclass(frozen=True)
class Call:
    """One call of the user's function in micro-batches: its arguments, ready to be cut."""

    fun: Callable[..., Any]
    options: Options
    roles: Roles
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    groups: list[Group]

    @property
    def samples_of_largest(self) -> int:
        """Rows of the largest micro-batch."""
        return max(group.size for group in self.groups)

    def cutter(self, group: Group) -> Callable[[Any, Any], Arguments]:
        """A function from index within the group and carry to the arguments of that micro-batch."""
        options, roles = self.options, self.roles
        parts = [
            (argument, part_of(argument, group, options.layout, options.axis_name))
            for argument in roles.others
            if argument.changes
        ]
        keys = None if roles.rng is None else key_tree(self.args[roles.rng], options.axis_name)

        def arguments_of(index: Any, carry: Any) -> Arguments:
            positional, named = list(self.args), dict(self.kwargs)
            for argument, part in parts:
                if isinstance(argument.where, int):
                    positional[argument.where] = part(index)
                else:
                    named[argument.where] = part(index)
            if roles.rng is not None:
                positional[roles.rng] = jax.tree.map(lambda key: fold_in(key, group.first + index), keys)
            if roles.carry is not None:
                positional[roles.carry] = carry
            return Arguments(tuple(positional), named, self.weight_of(group.size, positional, named))

        return arguments_of

    def weight_of(self, samples: int, positional: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the declared weight of a micro-batch; its rows where the weight comes with the loss."""
        if not callable(self.options.weight):
            return jnp.asarray(samples)
        places = [argument.where for argument in self.roles.batch]
        values = [positional[place] for place in places if isinstance(place, int)]
        by_name = {place: named[place] for place in places if isinstance(place, str)}
        return arithmetic.as_weight(self.options.weight(*values, **by_name), "the weight")

    def evaluate(self, arguments: Arguments) -> Outcome:
        """Call the function; the outcome has the micro-batch's weight, returned or stated."""
        outcome = read(self.fun(*arguments.positional, **arguments.named), self.options.form)
        return outcome if self.options.form.returned else outcome.weighing(arguments.weight)


def key_tree(keys: Any, axis_name: Any) -> Any:
    """Return keys (one, or a tree of them such as flax's ``rngs``) that differ between devices."""
    return jax.tree.map(lambda key: key_of_device(key, axis_name), keys)


def run(groups: list[Group], body_of: Callable[[Group], Body], state: Any) -> tuple[Any, list[Any]]:
    """Go through every group: a loop, or one call where there is one micro-batch.

    Returns:
        The last state and, for each group, what its micro-batches gave, stacked.
    """
    found: list[Any] = []
    for group in groups:
        body = body_of(group)
        if group.count == 1:
            state, one = body(state, 0)
            found.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], one))
        else:
            indices = jnp.arange(group.count)
            body = for_loop(body, state, jax.ShapeDtypeStruct((), indices.dtype))
            state, many = lax.scan(body, state, indices)
            found.append(many)
    return state, found


def first_carry(call: Call) -> Any:
    """The state that the first micro-batch starts from; None where there is none."""
    if call.roles.carry is None:
        return None
    start = jax.tree.map(jnp.asarray, call.args[call.roles.carry])
    return varying(start, call.options.axis_name)


def plan_extra(call: Call) -> Planned | None:
    """Return the weight of the window if the function returns an extra term; None where it does not.

    The two parts of such a loss have different divisors, so that one backward can only be used for both if
    the weight is known before. Only the weights are computed here: what they do not need, XLA leaves out.
    """
    if not call.options.form.returned:
        return None

    def outcome_of(group: Group, carry: Any, index: Any) -> Outcome:
        return call.evaluate(call.cutter(group)(index, carry))

    carry = first_carry(call)
    shape = jax.eval_shape(lambda: outcome_of(call.groups[0], carry, 0).without_aux())
    if shape.extra is None:
        return None

    def body_of(group: Group) -> Body:
        def body(carry: Any, index: Any) -> tuple[Any, Any]:
            outcome = outcome_of(group, carry, index)
            keep = arithmetic.takes_part(outcome.weight, call.options.reduction)
            return kept(outcome.carry, carry, keep), outcome.weight

        return body

    _, stacked = run(call.groups, body_of, carry)
    weights = jnp.concatenate(stacked)
    samples = jnp.asarray(sizes(call.groups)).sum()  # rows count in the extra term, tokens in them or not
    total = arithmetic.total_weight(weights)
    return Planned(*summed((total, samples.astype(total.dtype)), call.options.axis_name))


def sizes(groups: list[Group]) -> Any:
    """Return the samples of each micro-batch, in order.

    Examples:
        >>> sizes([Group(2, 4, 0, 0), Group(1, 2, 8, 2)]).tolist()
        [4, 4, 2]
    """
    return np.repeat([group.size for group in groups], [group.count for group in groups])


def kept(new: Any, old: Any, keep: Any) -> Any:
    """Return the new state, but the old one where the micro-batch does not take part."""
    return jax.tree.map(lambda one, other: jnp.where(keep, one, other), new, old)


def extra_share(planned: Planned, size: int, weight: Any, reduction: str) -> Any:
    """Return the factor of an extra term beside a loss that gets ``w_i / W`` (``1 / W`` for a sum) later.

    The extra term counts ``n_i / N``, so the factor is ``W n_i / (N w_i)``, without ``w_i`` for a sum.

    Examples:
        >>> print(extra_share(Planned(jnp.float32(10), jnp.float32(8)), 4, jnp.float32(5), "mean"))
        1.0
    """
    share = planned.weight * size / jnp.where(planned.samples == 0, 1, planned.samples)
    if reduction == "mean":
        share = share / jnp.where(weight == 0, 1, weight)
    return jnp.where(arithmetic.takes_part(weight, reduction), share, 0)


def gradients(call: Call) -> tuple[Any, Any, list[PerMicrobatch]]:
    """Add up ``w_i g_i`` (``g_i`` for a sum) over the window.

    Returns:
        The sums, the last carry (None without one), and what is kept of each micro-batch, by group.
    """
    planned = plan_extra(call)
    positions = call.roles.differentiated
    chosen = call.args[positions] if isinstance(positions, int) else tuple(call.args[i] for i in positions)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(
            jnp.shape(leaf), arithmetic.sum_dtype(jnp.result_type(leaf), call.options.accumulator_dtype)
        ),
        chosen,
    )
    zeros = varying(zeros, call.options.axis_name)

    def body_of(group: Group) -> Body:
        return microbatch_body(call, group, planned)

    (sums, carry), found = run(call.groups, body_of, (zeros, first_carry(call)))
    return sums, carry, found


def microbatch_body(call: Call, group: Group, planned: Planned | None) -> Body:
    """Return the body of the loop: the gradient of one micro-batch, added to the sums."""
    options, arguments_of = call.options, call.cutter(group)

    def body(state: Any, index: Any) -> tuple[Any, PerMicrobatch]:
        sums, carry = state
        arguments = arguments_of(index, carry)

        def objective(*positional: Any) -> tuple[Any, Outcome]:
            outcome = call.evaluate(Arguments(positional, arguments.named, arguments.weight))
            if planned is None:
                return outcome.loss, outcome
            share = extra_share(planned, group.size, outcome.weight, options.reduction)
            return outcome.loss + share.astype(outcome.extra.dtype) * outcome.extra, outcome

        def extra(*positional: Any) -> Any:
            return objective(*positional)[1].extra

        positions = call.roles.differentiated
        (_, outcome), gradient = jax.value_and_grad(objective, positions, has_aux=True)(*arguments.positional)
        weight = outcome.weight
        keep = arithmetic.takes_part(weight, options.reduction)
        if options.nonfinite == "skip_microbatch":
            finite = arithmetic.all_finite((outcome.loss, gradient))
            keep, weight = keep & finite, jnp.where(finite, weight, jnp.zeros_like(weight))
        factor, counts = weight, keep
        if planned is not None and options.reduction == "mean":
            # A mean over no token is NaN, and so is its gradient: the rows' own term is then taken alone.
            alone = jax.grad(extra, positions)
            gradient = lax.cond(keep, lambda: gradient, lambda: alone(*arguments.positional))
            rows = planned.weight * group.size / planned.samples
            factor, counts = jnp.where(keep, weight.astype(rows.dtype), rows), jnp.ones_like(keep)
        part = contribution(gradient, sums, factor, counts, options)
        new = kept(outcome.carry, carry, keep) if options.may_leave_out else outcome.carry
        square = arithmetic.square_norm(part) if options.noise else None
        found = PerMicrobatch(outcome.loss, weight, keep, outcome.extra, outcome.aux, square)
        return (jax.tree.map(jnp.add, sums, part), new), found

    return body


def contribution(gradient: Any, sums: Any, weight: Any, keep: Any, options: Options) -> Any:
    """Return ``w g`` (``g`` for a sum) in the dtypes of the sums; zeros where it is not kept.

    The gradient is widened before it is multiplied: times 1000 tokens a float16 overflows.
    """

    def one(leaf: Any, total: Any) -> Any:
        part = leaf.astype(total.dtype)
        if options.reduction == "mean":
            part = part * weight.astype(jnp.finfo(total.dtype).dtype)
        return jnp.where(keep, part, jnp.zeros_like(part)) if options.may_leave_out else part

    return jax.tree.map(one, gradient, sums)
