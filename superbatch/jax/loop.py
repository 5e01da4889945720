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
from .parts import fold_in, part_of
from .roles import Roles
from .sharding import key_of_device, varying, varying_like
from .splitting import Group
from .state import next_state

Body = Callable[[Any, Any], tuple[Any, Any]]


class PerMicrobatch(NamedTuple):
    """Results of the loop for each micro-batch of a group, stacked: arrays of shape [count, ...].

    Attributes:
        loss: the loss; for several losses a dict by name.
        weight: the weight, in the same form.
        keep: False for micro-batches that are left out.
        aux: the aux of the user's function.
        square: the squared norm of the contribution to the gradient; None without noise.
    """

    loss: Any
    weight: Any
    keep: Any
    aux: Any
    square: Any


class Arguments(NamedTuple):
    """Arguments of the user's function for one micro-batch, with the declared weight of this micro-batch."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    weight: Any


@dataclass(frozen=True)
class Call:
    """One call of the user's function, to be computed in micro-batches.

    Attributes:
        fun: the user's function.
        options: the options of `value_and_grad`.
        roles: the role of each argument.
        args: the positional arguments.
        kwargs: the keyword arguments.
        groups: the division of the batch.
    """

    fun: Callable[..., Any]
    options: Options
    roles: Roles
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    groups: list[Group]

    @property
    def count(self) -> int:
        """Number of micro-batches of the batch, those of padding included."""
        return sum(group.count for group in self.groups)

    @property
    def real_count(self) -> Any:
        """Number of micro-batches to compute; traced if `num_real_microbatches` is."""
        real = self.options.num_real_microbatches
        return self.count if real is None else jnp.clip(real, 0, self.count)

    @property
    def samples_of_largest(self) -> int:
        """Rows of the largest micro-batch."""
        return max(group.size for group in self.groups)

    def cutter(self, group: Group) -> Callable[[Any, Any], Arguments]:
        """Return a function ``(index within the group, carry) -> arguments`` of a micro-batch."""
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
        """Return the declared weight of a micro-batch; for several losses a dict by name.

        If the function returns the weight with the loss, the result is the number of rows, a placeholder.

        Args:
            samples: the rows of the micro-batch.
            positional: its positional arguments.
            named: its keyword arguments.
        """
        places = [argument.where for argument in self.roles.batch]
        values = [positional[place] for place in places if isinstance(place, int)]
        by_name = {place: named[place] for place in places if isinstance(place, str)}

        def of_term(term: str) -> Any:
            weight, what = self.options.weight_of(term), f"the weight of the term {term!r}"
            if not callable(weight):
                return jnp.asarray(samples)
            return arithmetic.as_weight(weight(*values, **by_name), what if term else "the weight")

        terms = self.options.terms
        return {term: of_term(term) for term in terms} if terms else of_term("")

    def evaluate(self, arguments: Arguments) -> Outcome:
        """Call the function on a micro-batch; fill in the declared weight where none was returned."""
        outcome = read(self.fun(*arguments.positional, **arguments.named), self.options.form)
        if self.options.form.returned:
            return outcome
        stated = arguments.weight
        return outcome.weighing({**stated, **outcome.weight} if outcome.has_terms else stated)


def key_tree(keys: Any, axis_name: Any) -> Any:
    """Return random keys (one, or a tree such as flax's ``rngs``) that differ between devices."""
    return jax.tree.map(lambda key: key_of_device(key, axis_name), keys)


def run_call(call: Call, body_of: Callable[[Group], Body], state: Any) -> tuple[Any, list[Any]]:
    """Run every group of a call as `run` does, but skip the micro-batches of padding."""
    real = call.options.num_real_microbatches
    if real is None:
        return run(call.groups, body_of, state)
    results: list[Any] = []
    for group in call.groups:
        body = body_of(group)
        if isinstance(real, jax.core.Tracer):
            state, many = run_real(call, group, body, state)
        else:
            state, many = run_first(group, min(max(int(real) - group.first, 0), group.count), body, state)
        results.append(many)
    return state, results


def run_first(group: Group, count: int, body: Body, state: Any) -> tuple[Any, Any]:
    """Compute the first `count` micro-batches of a group; the results of the others are zeros.

    By a scan, which JAX can differentiate; `run_real` cannot be differentiated.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    body = for_loop(body, state, index)
    one = jax.eval_shape(body, state, index)[1]
    rest = jax.tree.map(lambda leaf: jnp.zeros((group.count - count, *leaf.shape), leaf.dtype), one)
    rest = varying_like(rest, one)
    if not count:
        return state, rest
    state, many = lax.scan(body, state, jnp.arange(count, dtype=jnp.int32))
    return state, jax.tree.map(lambda leaf, zeros: jnp.concatenate([leaf, zeros]), many, rest)


def run(groups: list[Group], body_of: Callable[[Group], Body], state: Any) -> tuple[Any, list[Any]]:
    """Run the body over every group: a loop, or one call for a single micro-batch.

    Returns:
        The last state and, for each group, the stacked results of its micro-batches.
    """
    results: list[Any] = []
    for group in groups:
        body = body_of(group)
        if group.count == 1:
            state, one = body(state, 0)
            results.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], one))
        else:
            indices = jnp.arange(group.count)
            body = for_loop(body, state, jax.ShapeDtypeStruct((), indices.dtype))
            state, many = lax.scan(body, state, indices)
            results.append(many)
    return state, results


def run_real(call: Call, group: Group, body: Body, state: Any) -> tuple[Any, Any]:
    """Compute the micro-batches of a group that are not padding; the results of the others are zeros.

    Zeros mean a weight of 0 and ``keep=False``, so no other function needs to handle padding.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    body = for_loop(body, state, index)
    one = jax.eval_shape(body, state, index)[1]
    stacked = jax.tree.map(lambda leaf: jnp.zeros((group.count, *leaf.shape), leaf.dtype), one)

    def step(number: Any, carried: Any) -> Any:
        state, stacked = carried
        state, one = body(state, number)
        write = lambda every, leaf: lax.dynamic_update_index_in_dim(every, leaf, number, 0)  # noqa: E731
        return state, jax.tree.map(write, stacked, one)

    # Not a scan: its length is fixed when it is traced, so it would also compute the padding.
    real = jnp.clip(call.real_count - group.first, 0, group.count).astype(jnp.int32)
    return lax.fori_loop(0, real, step, (state, varying_like(stacked, one)))


def first_carry(call: Call) -> Any:
    """Return the state for the first micro-batch; None without `carry_argnum`."""
    if call.roles.carry is None:
        return None
    start = jax.tree.map(jnp.asarray, call.args[call.roles.carry])
    return varying(start, call.options.axis_name)


def sizes(groups: list[Group]) -> Any:
    """Return the samples of each micro-batch, in order.

    Examples:
        >>> sizes([Group(2, 4, 0, 0), Group(1, 2, 8, 2)]).tolist()
        [4, 4, 2]
    """
    return np.repeat([group.size for group in groups], [group.count for group in groups])


def select_state(new: Any, old: Any, keep: Any) -> Any:
    """Return the new state, or the old one if the micro-batch is left out."""
    return jax.tree.map(lambda one, other: jnp.where(keep, one, other), new, old)


def gradients(call: Call, body_of: Callable[[Call, Group], Body]) -> tuple[Any, Any, list[PerMicrobatch]]:
    """Run the loop and sum the gradients of the micro-batches.

    Returns:
        The sums, the last carry (None without one), and the results of the micro-batches by group.
    """
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(
            jnp.shape(leaf), arithmetic.sum_dtype(jnp.result_type(leaf), call.options.accumulator_dtype)
        ),
        chosen_of(call),
    )
    # The carry of a scan must not change its type: the sums vary over devices like the gradients.
    zeros = varying_like(varying(zeros, call.options.axis_name), chosen_of(call))
    state = (zeros, first_carry(call))
    (sums, carry), by_group = run_call(call, lambda group: body_of(call, group), state)
    return sums, carry, by_group


def chosen_of(call: Call) -> Any:
    """Return the differentiated arguments: one for an int as `argnums`, else a tuple."""
    positions = call.roles.differentiated
    return call.args[positions] if isinstance(positions, int) else tuple(call.args[i] for i in positions)


def without_cotangent(tree: Any, keep: Any) -> Any:
    """Return the same values, with a derivative of 0 if they are not kept.

    `where` alone is not enough: its derivative multiplies the derivative of a discarded value by 0. If that
    derivative is NaN, as it may be in a second derivative, the product is NaN too.

    Examples:
        >>> def root(x, keep):
        ...     return jnp.where(keep, jnp.sqrt(without_cotangent(x, keep)), 0)
        >>> print(jax.grad(root)(0.0, jnp.array(False)))
        0.0
    """
    return jax.tree.map(lambda leaf: jnp.where(keep, leaf, lax.stop_gradient(leaf)), tree)


def guarded(call: Call, arguments: Arguments, keep: Any) -> Arguments:
    """Return the arguments, with `without_cotangent` applied to those that are differentiated."""
    chosen = call.roles.differentiated
    places = (chosen,) if isinstance(chosen, int) else chosen
    positional = tuple(
        without_cotangent(value, keep) if place in places else value
        for place, value in enumerate(arguments.positional)
    )
    return Arguments(positional, arguments.named, arguments.weight)


def microbatch_body(call: Call, group: Group) -> Body:
    """Return the body of the loop: it adds ``w_i g_i`` of one micro-batch (``g_i`` for a sum) to the sums."""
    options, arguments_of = call.options, call.cutter(group)

    def body(state: Any, index: Any) -> tuple[Any, PerMicrobatch]:
        sums, carry = state
        arguments = arguments_of(index, carry)
        # A weight that `fun` returns is known only after its forward.
        if callable(options.weight):
            arguments = guarded(
                call, arguments, arithmetic.takes_part(arguments.weight, options.reduction_of(""))
            )

        def objective(*positional: Any) -> tuple[Any, Outcome]:
            outcome = call.evaluate(Arguments(positional, arguments.named, arguments.weight))
            return outcome.loss, outcome

        differentiated = jax.value_and_grad(objective, call.roles.differentiated, has_aux=True)
        (_, outcome), gradient = differentiated(*arguments.positional)
        weight = outcome.weight
        keep = arithmetic.takes_part(weight, options.reduction_of(""))
        if options.nonfinite == "skip_microbatch":
            finite = arithmetic.all_finite((outcome.loss, gradient))
            keep, weight = keep & finite, jnp.where(finite, weight, jnp.zeros_like(weight))
        part = contribution(gradient, sums, weight, keep, options)
        new = next_state(outcome.carry, carry, alone=call.count == 1)
        new = select_state(new, carry, keep) if options.may_leave_out else new
        square = arithmetic.square_norm(part) if options.noise else None
        result = PerMicrobatch(outcome.loss, weight, keep, outcome.aux, square)
        return (jax.tree.map(jnp.add, sums, part), new), result

    return body


def contribution(gradient: Any, sums: Any, weight: Any, keep: Any, options: Options) -> Any:
    """Return ``w g`` (``g`` for a sum) in the dtypes of the sums; zeros if the micro-batch is left out."""
    factor = weight if options.reduction == "mean" else None
    keep = keep if options.may_leave_out else None  # else every micro-batch takes part
    return jax.tree.map(
        lambda leaf, total: arithmetic.weighted(leaf, total.dtype, factor, keep), gradient, sums
    )
