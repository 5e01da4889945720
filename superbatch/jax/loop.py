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
    """Results of the loop for every micro-batch, stacked; of a group: [count, ...].

    Of a loss of several terms, `loss` and `weight` are dicts by term.
    """

    loss: Any
    weight: Any
    keep: Any
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
    def count(self) -> int:
        """Micro-batches of the batch, padding included."""
        return sum(group.count for group in self.groups)

    @property
    def real_count(self) -> Any:
        """Micro-batches that are computed: all of them, or the first ones, known when the program runs."""
        real = self.options.num_real_microbatches
        return self.count if real is None else jnp.clip(real, 0, self.count)

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
        """Return the declared weight of a micro-batch, by term if there are several.

        It is the number of rows where the weight comes with the loss.
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
        """Call the function; the outcome has the micro-batch's weight, returned or stated."""
        outcome = read(self.fun(*arguments.positional, **arguments.named), self.options.form)
        if self.options.form.returned:
            return outcome
        stated = arguments.weight
        return outcome.weighing({**stated, **outcome.weight} if outcome.has_terms else stated)


def key_tree(keys: Any, axis_name: Any) -> Any:
    """Return keys (one, or a tree of them such as flax's ``rngs``) that differ between devices."""
    return jax.tree.map(lambda key: key_of_device(key, axis_name), keys)


def run_call(call: Call, body_of: Callable[[Group], Body], state: Any) -> tuple[Any, list[Any]]:
    """Run every group of a call, without the micro-batches that are padding; see `run`."""
    real = call.options.num_real_microbatches
    if real is None:
        return run(call.groups, body_of, state)
    found: list[Any] = []
    for group in call.groups:
        body = body_of(group)
        if isinstance(real, jax.core.Tracer):
            state, many = run_real(call, group, body, state)
        else:
            state, many = run_first(group, min(max(int(real) - group.first, 0), group.count), body, state)
        found.append(many)
    return state, found


def run_first(group: Group, count: int, body: Body, state: Any) -> tuple[Any, Any]:
    """Compute the first micro-batches of a group, a number known now; the others give zeros.

    A scan, which has a second derivative; a loop of a length known only when the program runs has none.
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
    """Run every group: a loop, or one call where there is one micro-batch.

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


def run_real(call: Call, group: Group, body: Body, state: Any) -> tuple[Any, Any]:
    """Compute the micro-batches of a group that are no padding; the others give zeros.

    Zeros are a weight of 0 and False for `keep`, so that no other function needs to handle padding.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    body = for_loop(body, state, index)
    one = jax.eval_shape(body, state, index)[1]
    stacked = jax.tree.map(lambda leaf: jnp.zeros((group.count, *leaf.shape), leaf.dtype), one)

    def step(number: Any, carried: Any) -> Any:
        state, stacked = carried
        state, one = body(state, number)
        place = lambda every, leaf: lax.dynamic_update_index_in_dim(every, leaf, number, 0)  # noqa: E731
        return state, jax.tree.map(place, stacked, one)

    # Not a scan: its length is fixed, so it would compute the padding, too.
    real = jnp.clip(call.real_count - group.first, 0, group.count).astype(jnp.int32)
    return lax.fori_loop(0, real, step, (state, varying_like(stacked, one)))


def first_carry(call: Call) -> Any:
    """The state that the first micro-batch starts from; None where there is none."""
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


def kept(new: Any, old: Any, keep: Any) -> Any:
    """Return the new state, but the old one where the micro-batch does not take part."""
    return jax.tree.map(lambda one, other: jnp.where(keep, one, other), new, old)


def gradients(call: Call, body_of: Callable[[Call, Group], Body]) -> tuple[Any, Any, list[PerMicrobatch]]:
    """Run the loop and sum the gradients of the micro-batches.

    Returns:
        The sums, the last carry (None without one), and what is kept of each micro-batch, by group.
    """
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(
            jnp.shape(leaf), arithmetic.sum_dtype(jnp.result_type(leaf), call.options.accumulator_dtype)
        ),
        chosen_of(call),
    )
    zeros = varying_like(varying(zeros, call.options.axis_name), chosen_of(call))
    state = (zeros, first_carry(call))
    (sums, carry), found = run_call(call, lambda group: body_of(call, group), state)
    return sums, carry, found


def chosen_of(call: Call) -> Any:
    """Return the arguments that are differentiated: one, or a tuple, as `argnums` is."""
    positions = call.roles.differentiated
    return call.args[positions] if isinstance(positions, int) else tuple(call.args[i] for i in positions)


def without_cotangent(tree: Any, keep: Any) -> Any:
    """Return the same values, whose own derivative is 0 where they are not kept.

    A second derivative goes through the gradient of a micro-batch that is left out, where 0 x NaN is no 0.

    Examples:
        >>> def root(x, keep):
        ...     return jnp.where(keep, jnp.sqrt(without_cotangent(x, keep)), 0)
        >>> print(jax.grad(root)(0.0, jnp.array(False)))
        0.0
    """
    return jax.tree.map(lambda leaf: jnp.where(keep, leaf, lax.stop_gradient(leaf)), tree)


def guarded(call: Call, arguments: Arguments, keep: Any) -> Arguments:
    """Return the arguments, of which those that are differentiated have no derivative where not kept."""
    chosen = call.roles.differentiated
    places = (chosen,) if isinstance(chosen, int) else chosen
    positional = tuple(
        without_cotangent(value, keep) if place in places else value
        for place, value in enumerate(arguments.positional)
    )
    return Arguments(positional, arguments.named, arguments.weight)


def microbatch_body(call: Call, group: Group) -> Body:
    """Return the body of the loop: ``w_i g_i`` of one micro-batch (``g_i`` for a sum), added to the sums."""
    options, arguments_of = call.options, call.cutter(group)

    def body(state: Any, index: Any) -> tuple[Any, PerMicrobatch]:
        sums, carry = state
        arguments = arguments_of(index, carry)
        if callable(options.weight):  # else it is only known with the loss
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
        new = kept(new, carry, keep) if options.may_leave_out else new
        square = arithmetic.square_norm(part) if options.noise else None
        found = PerMicrobatch(outcome.loss, weight, keep, outcome.aux, square)
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
