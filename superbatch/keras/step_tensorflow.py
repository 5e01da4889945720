# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Train step on Keras' TensorFlow backend: a while_loop over micro-batches inside one step."""

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
untouched = nullcontext  # a StatelessScope is enough: the TensorFlow backend has no other state
TAKES_STATE = False  # the variables keep their values during training
cut = splitting.blocks


class Carry(NamedTuple):
    """State of the loop, passed from one micro-batch to the next.

    Attributes:
        gradients: the summed gradients, float32 or wider.
        sums: the summed vectors of `window.contribution`.
        norms: sums of the BatchNormalization statistics, see `batchnorm.Statistics`.
    """

    gradients: Values
    sums: Any
    norms: Values


class Batch(NamedTuple):
    """Constants of the loop over one batch of this replica."""

    model: Any
    data: Any
    options: Options
    plan: Plan
    rows: Any
    norms: batchnorm.Statistics
    touched: set[int]  # indices of the weights with a gradient; filled while the loop is traced


def train_step(model: Any, options: Options, data: Any) -> Any:
    """Make the update of one batch, and return Keras' logs.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        data: the batch of this replica, as Keras passes it.
    """
    data = keras.utils.unpack_x_y_sample_weight(data)
    rows = _length(data)
    replicas.check(model)
    if not replicas.several():  # on several, `build` has made the variables
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
    """Return the number of rows of a batch; if arrays have other lengths, the graph raises when it runs."""
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
    """Create the variables of model and optimizer before the step is traced on several replicas.

    The loop and the replicas must not create variables. On one device `train_step` creates them. On several,
    Keras' own method fails if the replicas get unequal shares of the first batch.
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
    """Return the next batch of the iterator in the arguments of Keras' train function; None if there is none.

    Also None with several replicas, which are not checked: each holds only a part of the batch.
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
    """Return the next batches of an iterator, as many as one call of Keras' train function takes."""
    batches: list[Any] = []
    while len(batches) < most:
        following = iterator.get_next_as_optional()
        if not following.has_value():
            break
        batches.append(following.get_value())
    return batches


def _as_dataset(batches: list[Any], spec: Any) -> Any:
    """Return a dataset of these batches with the element spec of the user's dataset.

    A spec with the lengths of the first batches would make Keras trace the step a second time.
    """

    def with_spec(leaf: Any, spec_of_leaf: Any) -> Any:
        if not isinstance(spec_of_leaf, tf.TensorSpec):
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, spec_of_leaf.shape)

    def batch_with_spec(*parts: Any) -> Any:
        return tf.nest.map_structure(with_spec, parts if isinstance(spec, tuple) else parts[0], spec)

    datasets = [tf.data.Dataset.from_tensors(batch).map(batch_with_spec) for batch in batches]
    joined = datasets[0]
    for following in datasets[1:]:
        joined = joined.concatenate(following)
    return joined


def _over(batch: Batch, one: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run `one` over near-equal micro-batches, whose number and sizes are only known when the step runs.

    Under XLA all micro-batches of a loop must have the same size. Then there are two loops, the second for
    micro-batches of one row less.
    """
    count = -(-batch.rows // batch.options.microbatch_size)
    size = batch.rows // tf.maximum(count, 1)
    larger = batch.rows - count * size
    if not batch.model.jit_compile:
        sizes = [(0, count, None)]
    else:
        sizes = [(0, larger, size + 1), (larger, count, size)]
    for first, last, fixed in sizes:

        def body(number: Any, carry: Any, fixed: Any = fixed) -> Any:
            start = number * size + tf.minimum(number, larger)
            length = fixed if fixed is not None else size + tf.cast(number < larger, size.dtype)
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

    def slice_of(leaf: Any) -> Any:
        if leaf is None:
            return None
        begin = [start] + [0] * (leaf.shape.rank - 1)
        some = tf.slice(leaf, begin, [length] + [-1] * (leaf.shape.rank - 1))
        return tf.ensure_shape(some, [None, *leaf.shape[1:]])  # tf.slice loses the static shape

    return keras.tree.map_structure(slice_of, data)


def _microbatch(batch: Batch, totals: Values, carry: Carry, microbatch: Any) -> Carry:
    """Return the carry after forward and backward of one micro-batch."""
    model, plan, weights = batch.model, batch.plan, batch.model.trainable_weights
    rows = tf.shape(splitting.leaves(microbatch)[0])[0]
    with tf.GradientTape() as tape:
        y_pred = forward.predictions(model, microbatch[0])
        terms = forward.terms_of(model, microbatch, y_pred, batch.options, plan)
        value = model.optimizer.scale_loss(window.objective(terms, totals, plan))
    raw = tape.gradient(value, weights)
    part = window.contribution(terms, rows, plan)
    batch.touched.update(number for number, gradient in enumerate(raw) if gradient is not None)
    # ensure_shape, as the static shape of a gradient may lack an axis of size 1.
    dense = [
        gradient if gradient is None else tf.ensure_shape(tf.convert_to_tensor(gradient), weight.shape)
        for gradient, weight in zip(raw, weights, strict=True)
    ]
    keep = window.kept([gradient for gradient in dense if gradient is not None], part, plan)
    if keep is not None:
        # `where`, not a product: the gradient of a micro-batch without tokens may be NaN.
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
        batch.norms.added(carry.norms, part[-1]),
    )


def _metrics(model: Any, microbatch: Any, y_pred: Any) -> Any:
    """Update the metrics; return a tensor, as a branch of `tf.cond` must."""
    tracking.update_metrics(model, microbatch, y_pred)
    return tf.constant(0)


def _count(batch: Batch) -> Any:
    """Return the sums of a pass that only counts weights; the graph omits all that no weight depends on."""

    def one(sums: Any, microbatch: Any) -> Any:
        with survey.scope(batch.model):
            y_pred = forward.predictions(batch.model, microbatch[0])
            terms = forward.terms_of(batch.model, microbatch, y_pred, batch.options, batch.plan)
            rows = tf.shape(splitting.leaves(microbatch)[0])[0]
            return sums + window.contribution(terms, rows, batch.plan)

    return _over(batch, one, tf.zeros(batch.plan.length, batch.plan.dtype))


def _finished(batch: Batch, carry: Carry, sums: Any, rows: Any) -> tuple[Values, Any]:
    """Return the gradient of the batch, and the value of the regularizers of weights (None without).

    The summed gradients are divided once; the gradient of the regularizers is added once.
    """
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
        if gradient is not None:  # a weight may have a regularizer and no gradient of the loss
            old, gradient = gradients[number], tf.convert_to_tensor(gradient)
            gradients[number] = gradient if old is None else old + gradient
    return gradients, value


def _apply(batch: Batch, sums: Any, gradients: Values) -> None:
    """Call the optimizer once; on a single replica not at all if the batch has weight 0."""
    model, weights = batch.model, batch.model.trainable_weights
    gradients = replicas.gradients_to_apply(model.optimizer, gradients, weights)

    def apply() -> Any:
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return tf.constant(0)

    # On several replicas an optimizer cannot run under a condition: it gets the gradient 0 of such a batch.
    if batch.plan.may_be_empty and not replicas.several():
        tf.cond(window.counts(sums, batch.plan), apply, lambda: tf.constant(0))
    else:
        apply()
