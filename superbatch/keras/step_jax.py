# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Train step on Keras' JAX backend: a scan over micro-batches inside one jitted step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax import lax

from . import arithmetic, batchnorm, forward, splitting, survey, tracking, window
from .first_check import First
from .options import Options
from .splitting import Group
from .window import Plan

Values = list[Any]
untouched = nullcontext  # a StatelessScope is enough: the JAX backend has no other state
TAKES_STATE = True  # Keras moves the values out of the variables and passes them to its train function


class State(NamedTuple):
    """The values of a model's variables, in the order in which Keras passes them to a train step."""

    trainable: Values
    other: Values
    optimizer: Values
    metrics: Values


class Carry(NamedTuple):
    """State of the loop, passed from one micro-batch to the next.

    Attributes:
        other: values of the non-trainable variables.
        metrics: values of the metrics' variables.
        gradients: the summed gradients, float32 or wider.
        sums: the summed vectors of `window.contribution`.
        norms: sums of the BatchNormalization statistics, see `batchnorm.Statistics`.
    """

    other: Values
    metrics: Values
    gradients: Values
    sums: Any
    norms: Values


class Batch(NamedTuple):
    """Constants of the loop over one batch."""

    model: Any
    state: State
    options: Options
    plan: Plan
    rows: int
    norms: batchnorm.Statistics


def train_step(model: Any, options: Options, state: Any, data: Any) -> Any:
    """Make the update of one batch.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        state: the values of the model's variables, as Keras passes them.
        data: the batch, as Keras passes it.

    Returns:
        The logs, and the new values of all variables.
    """
    state = State(*state)
    data = keras.utils.unpack_x_y_sample_weight(data)
    rows = splitting.leaves(data)[0].shape[0]
    with _scope(model, state):
        norms = batchnorm.Statistics(model)
    batch = Batch(model, state, options, _plan(model, state, data, options), rows, norms)
    parts = splitting.groups(rows, options.microbatch_size)
    counted = _count(batch, parts, data) if batch.plan.counting else None
    totals = window.totals_of(batch.plan, jnp.asarray(rows), counted)
    carry = Carry(
        state.other,
        state.metrics,
        [jnp.zeros(leaf.shape, arithmetic.wide(leaf.dtype)) for leaf in state.trainable],
        jnp.zeros(batch.plan.length, batch.plan.dtype),
        norms.zeros(),
    )

    def one(carry: Carry, microbatch: Any) -> Carry:
        return _microbatch(batch, totals, carry, microbatch)

    carry = _over(parts, one, carry, data, eager=model.run_eagerly)
    gradients, regularization = _finished(batch, carry)
    trainable, optimizer = _apply(batch, carry, gradients)
    return _end(batch, carry, State(trainable, carry.other, optimizer, carry.metrics), regularization)


def peek(model: Any, arguments: tuple[Any, ...]) -> First | None:
    """Return the next batch of the iterator in the arguments of Keras' train function; None if there is none.

    Also None with several processes, which are not checked: each holds only a part of the batch.
    """
    if jax.process_count() > 1:
        return None
    state, iterator = arguments
    data = next(iterator, None)
    if data is None:
        return None
    return First(data, _mapping(model, State(*state)), (state, chain([data], iterator)))


def restore(model: Any, state: Any) -> None:
    """Assign the variables the values that Keras moved out of them: an error must not lose the model."""
    state = State(*state)
    mapping = [*_mapping(model, state), *zip(model.optimizer.variables, state.optimizer, strict=True)]
    for variable, value in mapping:
        if not value.is_deleted():  # a compiled step may have been given the buffer already (donation)
            variable.assign(value)


def cut(rows: int, size: int) -> list[range]:
    """Return the rows of each micro-batch: strided within a group, as in `_over`."""
    return [
        range(group.start + i, group.start + group.count * group.size, group.count)
        for group in splitting.groups(rows, size)
        for i in range(group.count)
    ]


def _mapping(model: Any, state: State) -> list[tuple[Any, Any]]:
    """Return the model's variables with their values."""
    return [
        *zip(model.non_trainable_variables, state.other, strict=True),
        *zip(model.metrics_variables, state.metrics, strict=True),
        *zip(model.trainable_variables, state.trainable, strict=True),
    ]


def _scope(model: Any, state: State | Carry, trainable: Values | None = None) -> Any:
    """Return a scope in which the model's variables have the values of a state, or of a carry and weights."""
    mapping = [*zip(model.non_trainable_variables, state.other, strict=True)]
    mapping += zip(model.metrics_variables, state.metrics, strict=True)
    trainable = state.trainable if isinstance(state, State) else trainable
    if trainable is not None:
        mapping += zip(model.trainable_variables, trainable, strict=True)
    return keras.StatelessScope(state_mapping=mapping, collect_losses=True)


def _values(scope: Any, variables: Values) -> Values:
    return [scope.get_current_value(variable) for variable in variables]


def _plan(model: Any, state: State, data: Any, options: Options) -> Plan:
    """Return the plan for the batch, from a trace of its loss that computes nothing."""
    plans: list[Plan] = []

    def symbolic(state: State, data: Any) -> None:
        with _scope(model, state):
            plans.append(survey.inspect(model, data, options))

    jax.eval_shape(symbolic, state, data)
    return plans[0]


def _over(parts: list[Group], one: Callable[[Any, Any], Any], carry: Any, data: Any, *, eager: bool) -> Any:
    """Run `one` over the micro-batches, in one compiled loop for each group.

    Micro-batch i of a group of k has the rows ``i, i + k, ...`` of the group. If the batch is sharded in
    contiguous blocks, every device then holds its share of every micro-batch. The loop runs over indices and
    cuts each micro-batch out itself: a scan over the micro-batches would copy the batch.
    """
    for group in parts:
        cut = _cutting(group, data, whole=len(parts) == 1)
        if group.count == 1 or eager:
            for number in range(group.count):
                carry = one(carry, cut(number))
        else:
            turns = jnp.arange(group.count)
            carry, _ = lax.scan(lambda carry, number, cut=cut: (one(carry, cut(number)), None), carry, turns)
    return carry


def _cutting(group: Group, data: Any, *, whole: bool) -> Callable[[Any], Any]:
    """Return a function from an index to that micro-batch of a group.

    Args:
        group: the group.
        data: the batch.
        whole: whether the group is the whole batch.
    """
    # If the batch has two groups, a slice for each would be a copy, so rows are taken by index. Sharded rows
    # are sliced: by index, XLA would gather all of them on every device.
    if not whole and keras.distribution.distribution() is None:
        rows = group.start + group.count * jnp.arange(group.size)
        return lambda number: jax.tree.map(
            lambda leaf: jnp.take(leaf, rows + number, axis=0, mode="clip"), data
        )
    dealt = jax.tree.map(
        lambda leaf: leaf.reshape(group.size, group.count, *leaf.shape[1:]),
        splitting.part(data, group.start, group.start + group.count * group.size),
    )
    return lambda number: jax.tree.map(
        lambda leaf: lax.dynamic_index_in_dim(leaf, number, axis=1, keepdims=False), dealt
    )


def _microbatch(batch: Batch, totals: Values, carry: Carry, microbatch: Any) -> Carry:
    """Return the carry after forward and backward of one micro-batch."""
    model, plan = batch.model, batch.plan
    rows = splitting.leaves(microbatch)[0].shape[0]

    def loss(trainable: Values) -> Any:
        with _scope(model, carry, trainable) as scope:
            y_pred = forward.predictions(model, microbatch[0])
            terms = forward.terms_of(model, microbatch, y_pred, batch.options, plan)
            norms = batch.norms.added(carry.norms, rows)
            value = window.objective(terms, totals, plan)
            part = window.contribution(terms, rows, plan)
            tracking.update_metrics(model, microbatch, y_pred)
            new = Carry(
                _values(scope, model.non_trainable_variables),
                _values(scope, model.metrics_variables),
                [],
                part,
                norms,
            )
        return _scaled(model, batch.state, value), new

    gradients, new = jax.grad(loss, has_aux=True)(batch.state.trainable)
    keep = window.kept(gradients, new.sums, plan)
    if keep is None:
        added = [
            total + gradient.astype(total.dtype)
            for total, gradient in zip(carry.gradients, gradients, strict=True)
        ]
        return Carry(new.other, new.metrics, added, carry.sums + new.sums, new.norms)
    # `where`, not a product: the gradient of a micro-batch without tokens may be NaN.
    added = [
        total + jnp.where(keep, gradient, 0).astype(total.dtype)
        for total, gradient in zip(carry.gradients, gradients, strict=True)
    ]
    sums = carry.sums + jnp.where(keep, new.sums, 0)
    if not plan.skips:
        return Carry(new.other, new.metrics, added, sums, new.norms)
    selected = jax.tree.map(
        lambda after, before: jnp.where(keep, after, before),
        (new.metrics, new.norms),
        (carry.metrics, carry.norms),
    )
    return Carry(new.other, selected[0], added, sums, selected[1])


def _scaled(model: Any, state: State, loss: Any) -> Any:
    """Return the loss times the optimizer's loss scale, in the state of this step."""
    mapping = list(zip(model.optimizer.variables, state.optimizer, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return model.optimizer.scale_loss(loss)


def _count(batch: Batch, parts: list[Group], data: Any) -> Any:
    """Return the sums of a pass that only counts weights; XLA removes all that no weight depends on."""

    def one(sums: Any, microbatch: Any) -> Any:
        with _scope(batch.model, batch.state):
            y_pred = forward.predictions(batch.model, microbatch[0])
            terms = forward.terms_of(batch.model, microbatch, y_pred, batch.options, batch.plan)
            return sums + window.contribution(terms, splitting.leaves(microbatch)[0].shape[0], batch.plan)

    start = jnp.zeros(batch.plan.length, batch.plan.dtype)
    return _over(parts, one, start, data, eager=batch.model.run_eagerly)


def _finished(batch: Batch, carry: Carry) -> tuple[Values, Any]:
    """Return the gradient of the batch, and the value of the regularizers of weights (None without).

    The summed gradients are divided once; the gradient of the regularizers is added once.
    """
    model, plan = batch.model, batch.plan
    divisor = window.division(carry.sums, batch.rows, plan)
    gradients = [
        window.divided(total, divisor, leaf.dtype)
        for total, leaf in zip(carry.gradients, batch.state.trainable, strict=True)
    ]
    values: list[Any] = []

    def regularize(trainable: Values) -> Any:
        with _scope(model, carry, trainable):
            value = forward.weight_regularization(model)
        values.append(value)
        return jnp.zeros(()) if value is None else (_scaled(model, batch.state, value))

    jax.eval_shape(regularize, batch.state.trainable)  # only to see whether there are regularizers
    if values[0] is None:
        return gradients, None
    of_regularizers = jax.grad(regularize)(batch.state.trainable)
    with _scope(model, carry, batch.state.trainable):
        value = forward.weight_regularization(model)
    return [gradient + added for gradient, added in zip(gradients, of_regularizers, strict=True)], value


def _apply(batch: Batch, carry: Carry, gradients: Values) -> tuple[Values, Values]:
    """Return the updated weights and optimizer state; both unchanged if the batch has weight 0."""
    model, state = batch.model, batch.state

    def apply() -> Any:
        return model.optimizer.stateless_apply(state.optimizer, gradients, state.trainable)

    if not batch.plan.may_be_empty:
        return apply()
    return lax.cond(window.counts(carry.sums, batch.plan), apply, lambda: (state.trainable, state.optimizer))


def _end(batch: Batch, carry: Carry, state: State, regularization: Any) -> Any:
    """Return the result of Keras' train step: logs, and the values of all variables."""
    model = batch.model
    with _scope(model, state) as scope:
        batch.norms.assign(carry.norms)
        tracking.track_loss(model, carry.sums, batch.plan, jnp.asarray(batch.rows), regularization)
        logs = model.get_metrics_result()
        other = _values(scope, model.non_trainable_variables)
        metrics = _values(scope, model.metrics_variables)
    return logs, (state.trainable, other, state.optimizer, metrics)
