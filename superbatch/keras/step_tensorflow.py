# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""The train step on Keras' TensorFlow backend: a while_loop over micro-batches inside one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from . import arithmetic, batchnorm, forward, replicas, splitting, survey, tracking, window
from .first_check import First
from .options import Options
from .window import Plan

Values = list[Any]
untouched = nullcontext
TAKES_STATE = False


class Carry(NamedTuple):
    """State that one micro-batch hands to the next."""

    gradients: Values
    sums: Any
    norms: Values


class Batch(NamedTuple):
    """Facts about a batch (of this replica) that are known before its loop."""

    model: Any
    data: Any
    options: Options
    plan: Plan
    rows: Any
    norms: batchnorm.Statistics
    touched: set[int]  # the weights that have a gradient, known once the loop is traced


def train_step(model: Any, options: Options, data: Any) -> Any:
    """One batch, one update."""
    data = keras.utils.unpack_x_y_sample_weight(data)
    rows = _length(data)
    replicas.check(model)
    if not replicas.several():
        model._symbolic_build(data_batch=data)
    batch = Batch(
        model,
        data,
        options,
        survey.plan(model, data, options, symbolic=True),
        rows,
        batchnorm.Statistics(model),
        set(),
    )
    plan, weights = batch.plan, model.trainable_weights
    counted = replicas.summed(_count(batch)) if plan.counting else None
    rows_of_all = replicas.summed(rows)
    totals = window.totals_of(plan, rows_of_all, counted)
    carry = Carry(
        [tf.zeros(weight.shape, arithmetic.wide(weight.dtype)) for weight in weights],
        tf.zeros(plan.length, plan.dtype),
        batch.norms.zeros(),
    )
    carry = _over(batch, lambda carry, microbatch: _microbatch(batch, totals, carry, microbatch), carry)
    sums = replicas.summed(carry.sums)
    gradients, regularization = _finished(batch, carry, sums, rows_of_all)
    batch.norms.assign(carry.norms)
    _apply(batch, sums, gradients)
    tracking.track_loss(model, sums, plan, rows, regularization)
    return model.get_metrics_result()


def _length(data: Any) -> Any:
    """The rows of a batch; lengths that are only known when the step runs are compared there."""
    lengths = tf.stack([tf.shape(leaf)[0] for leaf in splitting.leaves(data)])
    same = tf.debugging.Assert(
        tf.reduce_all(lengths == lengths[0]),
        [
            "The arrays of the batch differ in their number of rows (below), and every array is split by "
            "rows. Give all arrays the same number of rows.",
            lengths,
        ],
    )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.identity(lengths[0])


def build(model: Any, iterator: Any, data: Any) -> None:
    """Make all variables before the step is traced: the loop, and replicas, must not make any.

    On one device that is done as the step is traced. On several, Keras' own method fails where they get
    unequal shares of the first batch.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    if iterator is not None:
        data = next(next(iter(iterator))[2])
    data = keras.tree.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], data)
    with strategy.scope():
        model._symbolic_build(data_batch=data)


def peek(model: Any, arguments: tuple[Any, ...]) -> First | None:
    """Return the next batch of the iterator that Keras' function is called with; None where there is none.

    Several replicas hold parts of a batch each; they are not checked.
    """
    iterator = arguments[0]
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return None
    if isinstance(iterator, tf.data.Iterator):
        taken = _taken(iterator, int(model.steps_per_execution))
        again = iter(_as_dataset(taken, iterator.element_spec)) if taken else None
    else:
        taken = [data for data in [next(iterator, None)] if data is not None]
        again = chain(taken, iterator)
    if not taken:
        return None
    data = keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, taken[0]
    )
    splitting.leaves(keras.utils.unpack_x_y_sample_weight(data))
    model._symbolic_build(data_batch=data)
    return First(data, [(weight, weight.value) for weight in model.trainable_variables], (again,))


def _taken(iterator: Any, most: int) -> list[Any]:
    """The next batches of an iterator, as many as one call of Keras' function takes."""
    found: list[Any] = []
    while len(found) < most:
        following = iterator.get_next_as_optional()
        if not following.has_value():
            break
        found.append(following.get_value())
    return found


def _as_dataset(batches: list[Any], spec: Any) -> Any:
    """Return a dataset of these batches, with the shapes that were known before: else Keras traces twice."""

    def forget(leaf: Any, known: Any) -> Any:
        if not isinstance(known, tf.TensorSpec):
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, known.shape)

    def forgetting(*parts: Any) -> Any:
        return tf.nest.map_structure(forget, parts if isinstance(spec, tuple) else parts[0], spec)

    datasets = [tf.data.Dataset.from_tensors(batch).map(forgetting) for batch in batches]
    found = datasets[0]
    for following in datasets[1:]:
        found = found.concatenate(following)
    return found


def cut(rows: int, size: int) -> list[range]:
    """Return the rows of each micro-batch."""
    return [
        range(group.start + i * group.size, group.start + (i + 1) * group.size)
        for group in splitting.groups(rows, size)
        for i in range(group.count)
    ]


def _over(batch: Batch, one: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run `one` over near-equal micro-batches, whose number and sizes are known when the step runs.

    XLA wants one size in a loop: there are two loops then, the second for micro-batches of a row less.
    """
    count = -(-batch.rows // batch.options.microbatch_size)
    size = batch.rows // tf.maximum(count, 1)
    larger = batch.rows - count * size
    if not batch.model.jit_compile:
        sizes = [(0, count, None)]
    else:
        sizes = [(0, larger, size + 1), (larger, count, size)]
    for first, last, known in sizes:

        def body(number: Any, carry: Any, known: Any = known) -> Any:
            start = number * size + tf.minimum(number, larger)
            length = known if known is not None else size + tf.cast(number < larger, size.dtype)
            return number + 1, one(carry, _rows(batch.data, start, length))

        _, carry = tf.while_loop(
            lambda number, _, last=last: number < last,
            body,
            (tf.convert_to_tensor(first, size.dtype), carry),
            parallel_iterations=1,
        )
    return carry


def _rows(data: Any, start: Any, length: Any) -> Any:
    """Return `length` rows, from `start` on, of every array of a batch."""

    def cut(leaf: Any) -> Any:
        if leaf is None:
            return None
        begin = [start] + [0] * (leaf.shape.rank - 1)
        found = tf.slice(leaf, begin, [length] + [-1] * (leaf.shape.rank - 1))
        return tf.ensure_shape(found, [None, *leaf.shape[1:]])  # which tf.slice forgets

    return keras.tree.map_structure(cut, data)


def _microbatch(batch: Batch, totals: Values, carry: Carry, microbatch: Any) -> Carry:
    """Forward, backward, and what is added to the sums."""
    model, plan, weights = batch.model, batch.plan, batch.model.trainable_weights
    rows = tf.shape(splitting.leaves(microbatch)[0])[0]
    with tf.GradientTape() as tape:
        y_pred = forward.predictions(model, microbatch[0])
        terms = forward.terms_of(model, microbatch, y_pred, batch.options, plan)
        value = model.optimizer.scale_loss(window.objective(terms, totals, plan))
    found = tape.gradient(value, weights)
    part = window.contribution(terms, rows, plan)
    batch.touched.update(number for number, gradient in enumerate(found) if gradient is not None)
    dense = [
        gradient if gradient is None else tf.ensure_shape(tf.convert_to_tensor(gradient), weight.shape)
        for gradient, weight in zip(found, weights, strict=True)  # of one feature, it does not know the 1
    ]
    keep = _kept([gradient for gradient in dense if gradient is not None], part, plan)
    if keep is not None:
        dense = [
            gradient if gradient is None else tf.where(keep, gradient, tf.zeros_like(gradient))
            for gradient in dense
        ]
        part = tf.where(keep, part, tf.zeros_like(part))
    if plan.skips:
        tf.cond(keep, lambda: _metrics(model, microbatch, y_pred), lambda: tf.constant(0))
    else:
        tracking.update_metrics(model, microbatch, y_pred)
    return Carry(
        [
            total if gradient is None else total + tf.cast(gradient, total.dtype)
            for total, gradient in zip(carry.gradients, dense, strict=True)
        ],
        carry.sums + part,
        batch.norms.noted(carry.norms, part[-1]),
    )


def _metrics(model: Any, microbatch: Any, y_pred: Any) -> Any:
    tracking.update_metrics(model, microbatch, y_pred)
    return tf.constant(0)


def _kept(gradients: Values, part: Any, plan: Plan) -> Any | None:
    """Return a flag that is False if a micro-batch is left out; None where every one takes part."""
    if not plan.may_be_empty:
        return None
    keep = window.counts(part, plan)
    if plan.skips:
        finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in [part, *gradients]]
        keep = tf.logical_and(keep, tf.reduce_all(tf.stack(finite)))
    return keep


def _count(batch: Batch) -> Any:
    """A pass that only counts: the graph keeps of it what masks need."""

    def one(sums: Any, microbatch: Any) -> Any:
        with survey.scope(batch.model):
            y_pred = forward.predictions(batch.model, microbatch[0])
            terms = forward.terms_of(batch.model, microbatch, y_pred, batch.options, batch.plan)
            rows = tf.shape(splitting.leaves(microbatch)[0])[0]
            return sums + window.contribution(terms, rows, batch.plan)

    return _over(batch, one, tf.zeros(batch.plan.length, batch.plan.dtype))


def _finished(batch: Batch, carry: Carry, sums: Any, rows: Any) -> tuple[Values, Any]:
    """Divide once, then add the gradient of the regularizers of weights, once; that and their value."""
    model, weights = batch.model, batch.model.trainable_weights
    divisor = window.division(sums, rows, batch.plan)
    gradients: Values = [
        window.divided(total, divisor, weight.dtype) if number in batch.touched else None
        for number, (total, weight) in enumerate(zip(carry.gradients, weights, strict=True))
    ]
    with tf.GradientTape() as tape:
        value = forward.weight_regularization(model)
        if value is None:
            return gradients, None
        scaled = model.optimizer.scale_loss(replicas.share(value))
    for number, gradient in enumerate(tape.gradient(scaled, weights)):
        if gradient is not None:
            old, gradient = gradients[number], tf.convert_to_tensor(gradient)
            gradients[number] = gradient if old is None else old + gradient
    return gradients, value


def _apply(batch: Batch, sums: Any, gradients: Values) -> None:
    """The update; none where nothing counts."""
    model, weights = batch.model, batch.model.trainable_weights
    gradients = replicas.ready(model.optimizer, gradients, weights)

    def apply() -> Any:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return tf.constant(0)

    if batch.plan.may_be_empty and not replicas.several():
        tf.cond(window.counts(sums, batch.plan), apply, lambda: tf.constant(0))
    else:
        apply()
