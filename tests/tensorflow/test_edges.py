# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""What an accumulator refuses, what it recovers from, and the optimizers it is used with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
import keras

from superbatch import InputError, NoiseMeter, NonFiniteError, OptimizerError, WindowError
from superbatch.tensorflow import Accumulator, add_noise
from tests.tensorflow.checks import LENGTHS, adam, wrapped
from tests.tensorflow.helpers import (
    assert_same,
    count,
    gradients,
    model,
    part,
    texts,
    tf,
    token_mean,
)

pytestmark = pytest.mark.tensorflow
WAYS = ["eager", "graph"]
NAN = float("nan")


def said(value: Any) -> str:
    """Names a case by what is said of it: how a tensor is printed differs from process to process."""
    return value if isinstance(value, str) else ""


def one(value: float = 1.0) -> Any:
    return tf.Variable([value], dtype=tf.float64)


def gradient(value: float) -> Any:
    return tf.constant([value], tf.float64)


def sgd(variables: list[Any], rate: float = 1.0, **options: Any) -> Any:
    optimizer = keras.optimizers.SGD(rate, **options)
    optimizer.build(variables)
    return optimizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variables": []}, "no variables"),
        ({"variables": tf.Variable(1.0)}, "variables are of type ResourceVariable"),
        ({"variables": [1.0]}, r"variables\[0\] of type float"),
        ({"variables": [tf.Variable(1)]}, r"variables\[0\] of dtype int32"),
        ({"reduction": "max"}, "reduction='max'"),
        ({"accumulator_dtype": "int8"}, "accumulator_dtype='int8'"),
        ({"accumulator_dtype": "float99"}, "accumulator_dtype='float99'"),
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"max_grad_value": NAN}, "max_grad_value=nan"),
        ({"nonfinite": "propagate"}, "nonfinite='propagate'"),
        (
            {"variables": [tf.Variable(1j)], "max_grad_value": 1.0},
            "max_grad_value=1.0 cannot clip complex variables",
        ),
    ],
    ids=said,
)
def test_options_that_cannot_be(changes: Any, message: str) -> None:
    options = {"variables": [tf.Variable(1.0)]} | changes
    with pytest.raises(InputError, match=message):
        Accumulator(options.pop("variables"), **options)


def test_a_variable_is_given_once() -> None:
    variable = tf.Variable(1.0)
    with pytest.raises(InputError, match="a variable twice"):
        Accumulator([variable, keras.Variable(1.0), variable])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([gradient(1.0)], 1), "1 as gradients of 2 variables"),
        ((gradient(1.0), 1), "a .*Tensor as gradients of 2 variables"),
        (
            ([gradient(1.0), tf.ones((1, 1), tf.float64)], 1),
            r"'b:0' has the shape \(1, 1\), and the variable \(1,\)",
        ),
        (
            ([gradient(1.0), tf.ones(2, tf.float64)], 1),
            r"'b:0' has the shape \(2,\), and the variable \(1,\)",
        ),
        (([gradient(1.0), tf.constant([1])], 1), "'b:0' is of dtype int32"),
        (([gradient(1.0), tf.constant([1j])], 1), "'b:0' is of dtype complex128"),
        (([gradient(1.0), "abc"], 1), r"gradient of 'b:0' has the shape \(\), and the variable"),
        (([gradient(1.0), tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))], 1), "a row of it"),
        (([gradient(1.0), None], -1), "weight -1 of a micro-batch"),
        (([gradient(1.0), None], NAN), "weight nan of a micro-batch"),
        (([gradient(1.0), None], True), "weight True of a micro-batch"),
        (([gradient(1.0), None], tf.constant([1.0, 2.0])), r"weight has the shape \(2,\)"),
        (([gradient(1.0), None], tf.constant(3.0, tf.bfloat16)), "weight has the dtype bfloat16"),
        (([gradient(1.0), None], "3"), "weight '3' of a micro-batch"),
        (
            ([gradient(1.0), None],),
            "add\\(\\) without weight=.*Pass weight=len\\(rows\\) for a mean over rows",
        ),
    ],
    ids=said,
)
def test_bad_input_changes_nothing(way: str, arguments: Any, message: str) -> None:
    accumulator = Accumulator([one(), tf.Variable([1.0], dtype=tf.float64, name="b")])
    accumulator.add([gradient(3.0), gradient(5.0)], 2)
    patterns = set(accumulator._patterns.seen)
    with pytest.raises(InputError, match=message):
        wrapped(lambda: accumulator.add(*arguments), way)()
    assert [float(mean[0]) for mean in accumulator.mean()] == [3.0, 5.0]
    assert accumulator._patterns.seen == patterns


@pytest.mark.parametrize("options", [{"loss": tf.ones(2)}, {"loss": "high"}, {"samples": -1}], ids=str)
def test_bad_loss_or_samples(options: Any) -> None:
    accumulator = Accumulator([one()])
    with pytest.raises(InputError, match="|".join(("loss=", "samples="))):
        accumulator.add([gradient(1.0)], 1, **options)


@pytest.mark.parametrize("bad", [-1.0, NAN])
def test_a_weight_that_a_graph_finds_to_be_bad_changes_nothing(bad: float) -> None:
    accumulator = Accumulator([one()])
    add = tf.function(lambda weight: accumulator.add([gradient(3.0)], weight))
    add(tf.constant(2.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite and not negative"):
        add(tf.constant(bad))
    add(tf.constant(1.0))
    assert float(accumulator.mean()[0][0]) == 3.0


def test_xla_leaves_the_assertion_out_and_the_boundary_sees_the_weight() -> None:
    variables = [one()]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    add = tf.function(lambda weight: accumulator.add([gradient(3.0)], weight), jit_compile=True)
    add(tf.constant(2.0))
    add(tf.constant(-1.0))
    with pytest.raises(NonFiniteError, match="not finite"):
        accumulator.apply(optimizer)
    add(tf.constant(2.0))
    assert accumulator.apply(optimizer).made and float(variables[0][0]) == -2.0


def test_dtypes_may_be_mixed_in_a_graph() -> None:
    variables = [tf.Variable([1.0]), tf.Variable([1.0], dtype=tf.bfloat16), one()]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    accumulator.add([tf.cast(gradient(0.5), v.dtype) for v in variables], 3)
    assert tf.function(lambda: accumulator.apply(optimizer))().made
    assert [float(v[0]) for v in variables] == [0.5, 0.5, 0.5]


def test_a_strategy_of_one_device() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        variables = [one()]
        optimizer = sgd(variables)
        accumulator = Accumulator(variables)
        with pytest.raises(WindowError, match=r"mean\(\) was called inside of strategy.run"):
            accumulator.mean()
    strategy.run(lambda: accumulator.add([gradient(0.5)], 3))
    with pytest.raises(WindowError, match=r"apply\(\) was called inside of strategy.run"):
        strategy.run(lambda: accumulator.apply(optimizer))
    assert accumulator.apply(optimizer).made and float(variables[0][0]) == 0.5


def test_a_mean_of_nothing() -> None:
    accumulator = Accumulator([one()])
    with pytest.raises(WindowError, match="nothing has weight"):
        accumulator.mean()
    accumulator.add([gradient(1.0)], 0)
    with pytest.raises(WindowError, match="nothing has weight"):
        accumulator.mean()


def test_weights_are_counted_exactly() -> None:
    """A float32 counter stops at 2**24."""
    variables = [one()]
    accumulator = Accumulator(variables)
    add = tf.function(lambda weight: accumulator.add([gradient(1.0)], weight))
    for weight in [2**24, 1, 1, 1, 2**40]:
        add(tf.constant(weight, tf.int64))
    assert int(accumulator.apply(sgd(variables)).weight) == 2**24 + 3 + 2**40
    assert float(variables[0][0]) == 0.0


@pytest.mark.parametrize("way", WAYS)
def test_raise_gives_up_the_window(way: str) -> None:
    variables = [one(), tf.Variable([1.0], dtype=tf.float64, name="bad")]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    add = wrapped(lambda x, y: accumulator.add([x, y], 1), way)
    apply = wrapped(lambda: accumulator.apply(optimizer), way)
    add(gradient(1.0), gradient(float("inf")))
    add(gradient(1.0), gradient(1.0))
    expected: Any = NonFiniteError if way == "eager" else tf.errors.InvalidArgumentError
    where = "the first variable with such a gradient is 'bad:0'" if way == "eager" else "is not finite"
    with pytest.raises(expected, match=where):
        apply()
    assert [float(v[0]) for v in variables] == [1.0, 1.0] and optimizer.iterations == 0
    add(gradient(0.5), gradient(0.25))
    assert apply().made
    assert [float(v[0]) for v in variables] == [0.5, 0.75]


@pytest.mark.parametrize("way", WAYS)
def test_skip_update_gives_up_the_window(way: str) -> None:
    variables = [one()]
    accumulator, optimizer = Accumulator(variables, nonfinite="skip_update"), sgd(variables)
    add = wrapped(lambda x: accumulator.add([x], 1), way)
    apply = wrapped(lambda: accumulator.apply(optimizer), way)
    add(gradient(NAN))
    add(gradient(1.0))
    applied = apply()
    assert not applied.made and float(applied.weight) == 2 and np.isnan(applied.grad_norm)
    assert float(variables[0][0]) == 1.0 and optimizer.iterations == 0
    add(gradient(0.5))
    assert apply().made and float(variables[0][0]) == 0.5


def test_a_norm_whose_squares_overflow_is_finite() -> None:
    variables = [tf.Variable([1.0, 1.0])]
    accumulator = Accumulator(variables, max_grad_norm=1.0)
    accumulator.add([tf.constant([3e30, 4e30])], 1)
    applied = accumulator.apply(keras.optimizers.SGD(1.0))
    assert applied.made and abs(float(applied.grad_norm) / 5e30 - 1) < 1e-6
    np.testing.assert_allclose(variables[0].numpy(), [0.4, 0.2], rtol=1e-6)


def test_clipping_by_value_and_by_norm() -> None:
    variables = [tf.Variable([0.0, 0.0], dtype=tf.float64)]
    accumulator = Accumulator(variables, max_grad_value=2.0, max_grad_norm=5.0)
    accumulator.add([tf.constant([6.0, 8.0], tf.float64)], 1)  # 3, 4 after the norm
    accumulator.apply(sgd(variables))
    assert variables[0].numpy().tolist() == [-2.0, -2.0]


def test_complex_variables() -> None:
    variable = tf.Variable([1 + 2j, 3 - 1j])
    accumulator = Accumulator([variable], max_grad_norm=1e9)
    found = [tf.constant([1 + 1j, 2.0]), tf.constant([5 - 3j, 2j])]
    add = tf.function(lambda g, w: accumulator.add([g], w))
    for each, weight in zip(found, (1, 3), strict=True):
        add(each, tf.constant(weight))
    (mean,) = accumulator.mean()
    np.testing.assert_allclose(mean.numpy(), [4 - 2j, 0.5 + 1.5j], rtol=1e-12)
    steps: list[Any] = []

    class Plain:
        def apply_gradients(self, pairs: Any) -> None:
            steps.extend(pairs)
            for each, v in pairs:
                v.assign_sub(each)

    norm = float(accumulator.apply(Plain()).grad_norm)
    assert abs(norm - np.linalg.norm([4 - 2j, 0.5 + 1.5j])) < 1e-12 and len(steps) == 1
    np.testing.assert_allclose(variable.numpy(), [-3 + 4j, 2.5 - 2.5j], rtol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_scale_is_taken_off_before_clipping(way: str) -> None:
    """float16 gradients of scaled losses; an overflow lowers the scale."""
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
def test_optimizers_that_cannot_be(optimizer: Any, options: Any, message: str) -> None:
    accumulator = Accumulator([one()], **options)
    accumulator.add([gradient(2.0)], 1)
    with pytest.raises(OptimizerError, match=message):
        accumulator.apply(optimizer)
    assert float(accumulator.mean()[0][0]) == 2.0, "the window stays"


def test_a_scale_that_a_graph_keeps() -> None:
    """Before an optimizer is built, its scale is a constant: a graph of `add` would keep it for ever."""
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
    assert float(accumulator.mean()[0][0]) == 12.0, "the window stays"
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
    with pytest.raises(OptimizerError, match="no gradient to any variable"):
        accumulator.apply(keras.optimizers.SGD(1.0))


def test_an_optimizer_that_raises_leaves_the_window() -> None:
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
    """Mixed shapes, weights of Keras, a sparse gradient by its Embedding, and a compiled graph of XLA."""
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


def test_an_embedding_is_updated_by_its_gradient_and_not_by_its_parts() -> None:
    """Keras squares the parts of a row that repeats one by one; we give it the row."""
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
    assert abs(float(sparse[0, 0] - dense[0, 0])) > 0.01, "the premise: Keras 3.15 tells them apart"


def test_a_window_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved are sums and counters, and not the model: that is the business of its own checkpoint."""
    batch, pairs = texts(LENGTHS), []
    for _ in range(2):
        variables = model()
        pairs.append((variables, Accumulator(variables)))
    (first, saved), (second, restored) = pairs
    head, tail = part(batch, 0, 5), part(batch, 5, 15)
    saved.add(gradients(first, head)[1], count(head))
    path = tf.train.Checkpoint(accumulator=saved).save(str(tmp_path / "window"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert len(names) == 4 + 1 + 2, names  # sums, counters; the checkpoint's own two
    status = tf.train.Checkpoint(accumulator=restored).restore(path)
    status.assert_consumed()
    for variables, accumulator in pairs:
        accumulator.add(gradients(variables, tail)[1], count(tail))
        assert int(accumulator.apply(adam()).weight) == sum(LENGTHS)
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    assert_same([*first], [*second], model())


def test_a_graph_refuses_a_window_that_it_was_not_drawn_for() -> None:
    """`apply` was traced when only the second variable had had gradients."""
    variables = [one(), one()]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    apply = tf.function(lambda: accumulator.apply(optimizer))
    accumulator.add([None, gradient(0.5)], 1)
    apply()
    accumulator.add([gradient(0.5), gradient(0.5)], 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Call each function that adds before"):
        apply()
    assert [float(v[0]) for v in variables] == [1.0, 0.5]
    accumulator.add([None, gradient(0.25)], 1)
    apply()
    assert [float(v[0]) for v in variables] == [1.0, 0.25]


def test_too_many_sets_of_variables_for_a_graph() -> None:
    variables = [one() for _ in range(6)]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    for index in range(6):
        accumulator.add([gradient(1.0) if index == number else None for number in range(6)], 1)
    with pytest.raises(WindowError, match="more than 16 sets"):
        tf.function(lambda: accumulator.apply(optimizer))()
    assert accumulator.apply(optimizer).made, "eager code needs no branches"


def test_a_reset_and_a_mean_in_a_graph() -> None:
    variables = [one(), one()]
    accumulator = Accumulator(variables)
    mean = tf.function(lambda: accumulator.mean()[0])
    accumulator.add([gradient(NAN), None], 1)
    tf.function(accumulator.reset)()
    accumulator.add([gradient(2.0), None], 1)
    accumulator.add([gradient(6.0), None], 3)
    assert float(mean()[0]) == 5.0
    with tf.GradientTape() as tape:
        loss = token_mean(model(), part(texts([2]), 0, 1))
    assert tape.gradient(loss, variables) == [None, None]


def test_noise_goes_into_a_meter() -> None:
    variables, meter = [tf.Variable([0.0], dtype=tf.float64)], NoiseMeter()
    accumulator, optimizer = Accumulator(variables, noise=True), sgd(variables, 0.0)
    draw = np.random.default_rng(0).normal
    for _ in range(200):  # |G|^2 = 1, a variance of 30 per sample
        for size in (8, 12):
            accumulator.add([gradient(1 + draw() * (30 / size) ** 0.5)], size)
        add_noise(meter, accumulator.apply(optimizer))
    noise = meter.estimate()
    assert meter.windows == 200 and noise.low < 30 < noise.high and round(noise.samples_per_window) == 20
    accumulator.add([gradient(1.0)], 0)
    add_noise(meter, accumulator.apply(optimizer))
    add_noise(meter, Accumulator(variables).apply(optimizer))
    assert meter.windows == 200
