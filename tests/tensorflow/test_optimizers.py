# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Optimizers of an accumulator: loss scaling, clipping, Keras models, embeddings, TensorFlow 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
import keras

from superbatch import OptimizerError
from superbatch.tensorflow import Accumulator
from tests.tensorflow.checks import LENGTHS, adam, wrapped
from tests.tensorflow.helpers import (
    WAYS,
    assert_same,
    count,
    gradient,
    gradients,
    model,
    one,
    part,
    sgd,
    texts,
    tf,
)

pytestmark = pytest.mark.tensorflow
NAN = float("nan")


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_unscaled_before_clipping(way: str) -> None:
    """Gradients of scaled losses are float16; an overflow lowers the scale."""
    variables = [tf.Variable([3.0, 4.0])]
    inner = keras.optimizers.SGD(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)
    accumulator = Accumulator(variables, max_grad_norm=1.0, max_grad_value=0.7)

    def add(factor: Any) -> None:
        with tf.GradientTape() as tape:
            half = tf.cast(variables[0], tf.float16)
            loss = optimizer.scale_loss(tf.reduce_sum(half**2) / 2 * tf.cast(factor, tf.float16))
        accumulator.add(tape.gradient(loss, variables), 1)

    optimizer.build(variables)
    add, apply = wrapped(add, way), wrapped(lambda: accumulator.apply(optimizer), way)
    add(tf.constant(1.0))
    add(tf.constant(1.0))
    applied = apply()
    assert float(applied.grad_norm) == 5.0 and applied.made
    np.testing.assert_allclose(variables[0].numpy(), [3 - 0.6, 4 - 0.7], rtol=1e-6)
    before = variables[0].numpy()
    add(tf.constant(1.0))
    add(tf.constant(100.0))  # 1024 x 330 is beyond float16
    applied = apply()
    assert not applied.made and float(applied.weight) == 2
    np.testing.assert_array_equal(variables[0].numpy(), before)
    assert float(optimizer.dynamic_scale.value) == 2.0**9 and inner.iterations == 1
    add(tf.constant(1.0))
    assert apply().made and inner.iterations == 2


def test_a_fixed_loss_scale() -> None:
    variables = [tf.Variable([3.0, 4.0])]
    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=128.0)
    accumulator = Accumulator(variables, max_grad_norm=1.0)
    accumulator.add([128 * variables[0]], 2)
    assert float(accumulator.apply(optimizer).grad_norm) == 5.0
    np.testing.assert_allclose(variables[0].numpy(), [2.4, 3.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (object(), {}, "optimizer of type object has no apply_gradients"),
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), {}, "gradient_accumulation_steps=2"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            {"nonfinite": "skip_microbatch"},
            "hides the overflows by which",
        ),
    ],
    ids=["object", "accumulates", "scales"],
)
def test_invalid_optimizers(optimizer: Any, options: Any, message: str) -> None:
    accumulator = Accumulator([one()], **options)
    accumulator.add([gradient(2.0)], 1)
    with pytest.raises(OptimizerError, match=message):
        accumulator.apply(optimizer)
    assert float(accumulator.mean()[0][0]) == 2.0, "the window is kept"


def test_a_graph_must_not_keep_an_initial_scale() -> None:
    """The scale of an unbuilt optimizer is a constant, which a graph of `add` would keep."""
    variables = [one()]

    def make() -> tuple[Any, Any, Any]:
        inner = keras.optimizers.SGD(0.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=1)
        accumulator = Accumulator(variables)

        @tf.function
        def add() -> None:
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(3 * variables[0][0])
            accumulator.add(tape.gradient(loss, variables), 1)

        return optimizer, accumulator, add

    optimizer, accumulator, add = make()
    add()
    with pytest.raises(OptimizerError, match=r"Call optimizer\.build\(variables\) before the first call"):
        accumulator.apply(optimizer)
    assert float(accumulator.mean()[0][0]) == 12.0, "the window is kept"
    optimizer, accumulator, add = make()
    optimizer.build(variables)
    norms = []
    for _ in range(3):
        add()
        norms.append(float(accumulator.apply(optimizer).grad_norm))
    assert float(optimizer.dynamic_scale.value) == 32.0, "the premise: the scale changed"
    assert norms == [3.0, 3.0, 3.0]


def test_a_window_without_any_gradient() -> None:
    accumulator = Accumulator([one()])
    accumulator.add([None], 3)
    with pytest.raises(OptimizerError, match="No variable has a gradient"):
        accumulator.apply(keras.optimizers.SGD(1.0))


def test_an_optimizer_that_raises_keeps_the_window() -> None:
    variables = [one()]
    accumulator = Accumulator(variables)
    accumulator.add([gradient(2.0)], 3)
    with pytest.raises(ValueError, match="Unknown variable"):
        accumulator.apply(sgd([one(2.0)]))
    assert float(accumulator.apply(sgd(variables)).weight) == 3


def test_optimizers_of_tensorflow_1() -> None:
    variables, plain = model(), model()
    batch = texts(LENGTHS)
    accumulator = Accumulator(variables)
    for start, stop in ((0, 5), (5, 15)):
        microbatch = part(batch, start, stop)
        _, found = gradients(variables, microbatch)
        accumulator.add(found, count(microbatch))
    ours, theirs = (tf.compat.v1.train.MomentumOptimizer(0.1, 0.9) for _ in range(2))
    accumulator.apply(ours)
    _, found = gradients(plain, part(batch, 0, 15))
    theirs.apply_gradients(zip(found, plain, strict=True))
    assert_same(variables, plain, model())


def test_a_keras_model() -> None:
    """The model has variables of several shapes and a sparse Embedding gradient; XLA compiles its graph."""
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Flatten(dtype="float64")(keras.layers.Embedding(7, 3, dtype="float64")(inputs))
    network = keras.Model(inputs, keras.layers.Dense(1, dtype="float64")(hidden))
    start = [weight.numpy() for weight in network.trainable_variables]
    copy = keras.models.clone_model(network)
    copy.set_weights(start)
    x, y = texts([4] * 10)["x"], tf.constant(np.random.default_rng(2).normal(size=(10, 1)))
    ours, theirs = adam(), adam()
    accumulator = Accumulator(network.trainable_variables)

    @tf.function(jit_compile=True)
    def microbatch(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(x) - y) ** 2)
        found = tape.gradient(loss, network.trainable_variables)
        accumulator.add(found, tf.shape(x)[0], loss=loss)

    for begin, end in ((0, 4), (4, 8), (8, 10)):
        microbatch(tf.constant(x[begin:end]), y[begin:end])
    applied = accumulator.apply(ours)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((copy(x) - y) ** 2)
    found = tape.gradient(loss, copy.trainable_variables)
    assert isinstance(found[0], tf.IndexedSlices), "the premise"
    theirs.apply([tf.convert_to_tensor(gradient) for gradient in found], copy.trainable_variables)
    assert abs(float(applied.loss - loss)) < 1e-14
    assert_same(
        [v.value for v in network.trainable_variables], [v.value for v in copy.trainable_variables], start
    )


def test_an_embedding_is_updated_by_the_sum_of_repeated_rows() -> None:
    """Keras squares each slice of a repeated row; superbatch passes their sum."""
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([0, 0]), tf.constant([3, 1]))
    sparse, dense, ours = (tf.Variable(tf.zeros((3, 1))) for _ in range(3))
    make = lambda: keras.optimizers.Adam(0.1, epsilon=1e-3)  # noqa: E731
    theirs = make()
    accumulator, optimizer = Accumulator([ours]), make()
    for _ in range(2):
        theirs.apply([rows], [sparse])
        accumulator.add([rows], 1)
        accumulator.apply(optimizer)
    as_dense = make()
    for _ in range(2):
        as_dense.apply([tf.convert_to_tensor(rows)], [dense])
    np.testing.assert_allclose(ours.numpy(), dense.numpy(), rtol=1e-6)
    assert abs(float(sparse[0, 0] - dense[0, 0])) > 0.01, "the premise: Keras 3.15 treats them differently"
