# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Checks as functions: the tests call them, and the mutants must make them fail."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from superbatch.tensorflow import Accumulator
from tests.tensorflow.helpers import (
    assert_same,
    count,
    gradients,
    model,
    part,
    texts,
    tf,
    token_mean,
    token_sum,
)

LENGTHS = [4, 1, 0, 0, 2, 3, 1, 4, 2, 1, 3, 2, 4, 1, 1]
WINDOWS = [[2, 2, 4], [3, 2], [2]]  # unequal micro-batches, the second empty; a tail


def adam() -> Any:
    schedule: Any = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.05])
    return keras.optimizers.Adam(schedule, epsilon=1e-3)


def signature() -> Any:
    return {
        "x": tf.TensorSpec([None, 4], tf.int64),
        "y": tf.TensorSpec([None, 4], tf.float64),
        "mask": tf.TensorSpec([None, 4], tf.float64),
    }


def train(
    accumulator: Any, variables: list[Any], optimizer: Any, *, way: str, loss_of: Any = token_mean
) -> Any:
    """Train on windows over texts, eagerly or in two graphs; return the outcome of each window."""
    batch, outcomes, start = texts(LENGTHS), [], 0

    def add_one(microbatch: Any) -> None:
        loss, found = gradients(variables, microbatch, loss_of)
        accumulator.add(found, count(microbatch), loss=loss)

    def update() -> Any:
        return accumulator.apply(optimizer)

    add: Any = add_one
    apply: Any = update
    if way == "graph":
        optimizer.build(variables)  # otherwise the first call is traced twice
        add, apply = tf.function(add, input_signature=[signature()]), tf.function(apply)
    for window in WINDOWS:
        for size in window:
            add(part(batch, start, start + size))
            start += size
        outcomes.append(apply())
    assert start == len(LENGTHS)
    if way == "graph":
        traces = [function.experimental_get_tracing_count() for function in (add, apply)]
        assert traces == [1, 1], traces
    return outcomes


def large_batch(
    variables: list[Any], optimizer: Any, clip: float | None = None
) -> tuple[list[float], list[float]]:
    """Train on the same windows without micro-batches; return losses and norms."""
    batch, start, losses, norms = texts(LENGTHS), 0, [], []
    for window in WINDOWS:
        whole = part(batch, start, start + sum(window))
        start += sum(window)
        loss, found = gradients(variables, whole)
        assert isinstance(found[0], tf.IndexedSlices), "the premise: an embedding has a sparse gradient"
        assert len(set(found[0].indices.numpy())) < len(found[0].indices), "the premise: words repeat"
        found[0] = tf.convert_to_tensor(found[0])
        norms.append(float(tf.linalg.global_norm(found)))
        if clip:
            assert norms[-1] > clip, "the premise: every update is clipped"
            found, _ = tf.clip_by_global_norm(found, clip)
        optimizer.apply(found, variables)
        losses.append(float(loss))
    return losses, norms


def windows(way: str = "eager", clip: float | None = None, reduction: Any = "mean") -> None:
    """Windows with token weights, unequal and empty micro-batches and a tail equal the large batch."""
    start, plain, ours = model(), model(), model()
    optimizer, theirs = adam(), adam()
    loss, found = gradients(ours, part(texts(LENGTHS), 2, 4))
    assert np.isnan(float(loss)) and np.isnan(found[1].numpy()).any(), "the premise: an empty one is 0 / 0"
    losses, norms = large_batch(plain, theirs, clip)
    accumulator = Accumulator(ours, max_grad_norm=clip, reduction=reduction)
    loss_of = token_sum if reduction == "sum" else token_mean
    outcomes = train(accumulator, ours, optimizer, way=way, loss_of=loss_of)
    assert_same(ours, plain, start)
    state = [[v for v in one.variables if v.shape] for one in (optimizer, theirs)]
    assert_same(*state, least=1e-9)
    assert optimizer.iterations == 3
    np.testing.assert_allclose([float(one.loss) for one in outcomes], losses, rtol=1e-12)
    np.testing.assert_allclose([float(one.grad_norm) for one in outcomes], norms, rtol=1e-12)
    assert [int(one.weight) for one in outcomes] == [sum(LENGTHS[:8]), sum(LENGTHS[8:13]), sum(LENGTHS[13:])]
    assert [int(one.microbatches) for one in outcomes] == [3, 2, 1]


def wrapped(function: Any, way: str) -> Any:
    return tf.function(function) if way == "graph" else function


def epoch_in_one_function() -> None:
    """An epoch with its windows and tail in one graph, with an optimizer not built before, is exact."""
    batch, rows, steps = texts(LENGTHS), 2, 3
    start, plain, ours = model(), model(), model()
    optimizer, theirs = adam(), adam()
    accumulator = Accumulator(ours, max_grad_norm=0.01)
    data = tf.data.Dataset.from_tensor_slices(batch).batch(rows)

    @tf.function
    def epoch() -> Any:
        updates = 0
        for number, microbatch in data.enumerate():
            loss, found = gradients(ours, microbatch)
            accumulator.add(found, count(microbatch), loss=loss)
            if (number + 1) % steps == 0:
                accumulator.apply(optimizer)
                updates += 1
        return updates, accumulator.apply(optimizer)

    updates, tail = epoch()
    for begin in range(0, len(LENGTHS), rows * steps):
        _, found = gradients(plain, part(batch, begin, begin + rows * steps))
        # TensorFlow's norm of a sparse gradient does not add up repeated rows.
        sparse, found[0] = found[0], tf.convert_to_tensor(found[0])
        assert tf.linalg.global_norm([sparse, *found[1:]]) != tf.linalg.global_norm(found)
        theirs.apply(tf.clip_by_global_norm(found, 0.01)[0], plain)
    assert_same(ours, plain, start)
    assert (int(updates), int(tail.microbatches), int(tail.weight)) == (2, 2, sum(LENGTHS[12:]))
    assert tail.microbatches < steps, "the premise: there is a tail"


def missing_gradients(way: str = "eager") -> None:
    """A variable without a gradient in the whole window is unchanged; in some micro-batches it counts as 0.

    Some micro-batches use only the last variable; in the second window all micro-batches with weight do so.
    """
    start = [tf.Variable([1.0, 2.0], dtype=tf.float64), tf.Variable(3.0, dtype=tf.float64)]
    ours, plain = ([tf.Variable(one) for one in start] for _ in range(2))
    optimizer, theirs = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    accumulator = Accumulator(ours)

    def both(x: Any, weight: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours[0] ** 2) * x * ours[1]
        accumulator.add(tape.gradient(loss, ours), weight)

    def last(x: Any, weight: Any) -> None:
        with tf.GradientTape() as tape:
            loss = x * ours[1] ** 2
        found = tape.gradient(loss, ours)
        assert found[0] is None, "the premise"
        accumulator.add(found, weight)

    optimizer.build(ours)
    both, last, apply = (wrapped(f, way) for f in (both, last, lambda: accumulator.apply(optimizer)))
    numbers = [tf.constant(x, tf.float64) for x in (0.5, 1.5, 2.0)]
    both(numbers[0], tf.constant(1))
    last(numbers[1], tf.constant(3))
    apply()
    first = ours[0].numpy()
    last(numbers[2], tf.constant(2))
    both(numbers[0], tf.constant(0))  # its weight is 0
    apply()
    np.testing.assert_array_equal(ours[0].numpy(), first, "momentum moved what has no gradient")
    both(numbers[2], tf.constant(2))
    apply()

    def by_hand(a: float, b: float, weight_a: int, weight_b: int) -> None:
        with tf.GradientTape() as tape:
            loss = a * tf.reduce_sum(plain[0] ** 2) * plain[1] * weight_a if weight_a else 0.0
            loss = (loss + weight_b * b * plain[1] ** 2) / (weight_a + weight_b)
        pairs = zip(tape.gradient(loss, plain), plain, strict=True)
        theirs.apply_gradients([(gradient, v) for gradient, v in pairs if gradient is not None])

    theirs.build(plain)
    by_hand(0.5, 1.5, 1, 3)
    by_hand(0.0, 2.0, 0, 2)
    by_hand(2.0, 0.0, 2, 0)
    assert_same(ours, plain, start)


def low_precision(dtype: str = "bfloat16", way: str = "eager") -> None:
    """Sum 1 + 511 x 0.003: a bfloat16 sum stops when 0.003 is less than half of its last bit."""
    exact, parts = 0.0, []
    for number in range(512):
        parts.append(tf.constant([1.0 if number == 0 else 0.003], dtype))
        exact += float(tf.cast(parts[-1][0], tf.float64)) / 512
    variable = tf.Variable(tf.zeros(1, dtype))
    errors = {}
    for choice in ("auto", None):
        accumulator = Accumulator([variable], accumulator_dtype=choice)
        add = wrapped(lambda gradient, a=accumulator: a.add([gradient], 1), way)
        for gradient in parts:
            add(gradient)
        (mean,) = accumulator.mean()
        assert mean.dtype == dtype
        errors[choice] = abs(float(mean[0]) / exact - 1)
    assert errors[None] > 0.01, "the premise: the low-precision type is too inexact"
    assert errors["auto"] < 2 ** (-8 if dtype == "bfloat16" else -11), errors


def nothing_has_weight(way: str = "eager") -> None:
    """A window of weight 0 changes no variable, momentum or counter, and does not affect the next window."""
    variable = tf.Variable([1.0], dtype=tf.float64)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build([variable])
    accumulator = Accumulator([variable])
    add = wrapped(lambda gradient, weight: accumulator.add([gradient], weight, loss=gradient[0]), way)
    apply = wrapped(lambda: accumulator.apply(optimizer), way)
    nan = tf.constant([float("nan")], tf.float64)
    add(tf.constant([2.0], tf.float64), tf.constant(3))
    assert apply().made
    before = [variable.numpy(), *(one.numpy() for one in optimizer.variables)]
    add(nan, tf.constant(0))
    add(nan, tf.constant(0))
    applied = apply()
    assert not applied.made and float(applied.weight) == 0 and int(applied.microbatches) == 2
    assert np.isnan(applied.loss) and np.isnan(applied.grad_norm)
    for old, new in zip(before, [variable.numpy(), *(v.numpy() for v in optimizer.variables)], strict=True):
        np.testing.assert_array_equal(old, new)
    add(tf.constant([4.0], tf.float64), tf.constant(1))
    assert float(apply().loss) == 4.0
    # v = 0.9 (-0.5 x 2) - 0.5 x 4, from 1 - 0.5 x 2
    np.testing.assert_allclose(variable.numpy(), [0.0 + 0.9 * -1.0 - 2.0], rtol=1e-6)


def bad_microbatch_left_out(way: str = "eager") -> None:
    """A non-finite micro-batch, sparse or dense, is left out with its weight."""
    variables = [tf.Variable([1.0, 1.0], dtype=tf.float64), tf.Variable(1.0, dtype=tf.float64)]
    accumulator = Accumulator(variables, nonfinite="skip_microbatch")

    def add(values: Any, dense: Any, weight: Any) -> None:
        rows = tf.IndexedSlices(values, tf.constant([1, 1]))
        accumulator.add([rows, dense], weight, loss=dense)

    add, apply = wrapped(add, way), wrapped(lambda: accumulator.apply(keras_sgd), way)
    keras_sgd = keras.optimizers.SGD(1.0)
    keras_sgd.build(variables)

    def f(*x: float) -> Any:
        return tf.reshape(tf.constant(x, tf.float64), [] if len(x) == 1 else [-1])

    add(f(1.0, 2.0), f(4.0), tf.constant(1))
    add(f(1.0, np.inf), f(1.0), tf.constant(5))
    add(f(1.0, 1.0), f(np.nan), tf.constant(5))
    add(f(0.0, 1.0), f(8.0), tf.constant(3))
    applied = apply()
    assert (int(applied.dropped), int(applied.microbatches), float(applied.weight)) == (2, 4, 4.0)
    assert float(applied.loss) == 7.0 and applied.made
    assert variables[0].numpy().tolist() == [1.0, 1.0 - 1.5] and float(variables[1]) == 1.0 - 7.0


def noise(way: str = "eager") -> None:
    """a2 and b2 equal those of separately computed gradients, with weights and an empty micro-batch."""
    variables, batch = model(), texts(LENGTHS)
    accumulator = Accumulator(variables, noise=True)
    sizes, start, squares = [2, 2, 4, 3, 4], 0, []

    def add(microbatch: Any, samples: Any) -> None:
        _, found = gradients(variables, microbatch)
        accumulator.add(found, count(microbatch), samples=samples)

    add = wrapped(add, way)
    weights = []
    for size in sizes:
        microbatch = part(batch, start, start + size)
        add(microbatch, tf.constant(size))
        _, found = gradients(variables, microbatch)
        weights.append(float(count(microbatch)))
        squares.append(float(tf.linalg.global_norm([tf.convert_to_tensor(one) for one in found])) ** 2)
        start += size
    assert weights[1] == 0 and np.isnan(squares[1]), "the premise: one is empty"
    _, whole = gradients(variables, part(batch, 0, start))
    norm = float(tf.linalg.global_norm([tf.convert_to_tensor(one) for one in whole]))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    applied = wrapped(lambda: accumulator.apply(optimizer), way)()
    shares = np.delete(weights, 1) / np.sum(weights)
    np.testing.assert_allclose(float(applied.a2), np.sum(shares**2 * np.delete(squares, 1)), rtol=1e-12)
    np.testing.assert_allclose(float(applied.b2), norm**2, rtol=1e-12)
    np.testing.assert_allclose(float(applied.q), np.sum(shares**2), rtol=1e-12)
    samples = 1 / np.sum(shares**2 / np.delete(sizes, 1))
    np.testing.assert_allclose(float(applied.effective_samples), samples, rtol=1e-12)
