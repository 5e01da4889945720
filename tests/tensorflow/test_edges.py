# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Errors of an accumulator, recovery from them, checkpoints and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
import keras

from superbatch import InputError, NoiseMeter, NonFiniteError, WindowError
from superbatch.tensorflow import Accumulator, add_noise
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
    token_mean,
)

pytestmark = pytest.mark.tensorflow
NAN = float("nan")


def message_id(value: Any) -> str:
    """Return the id of a case: its message, because the repr of a tensor differs between processes."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variables": []}, "variables is empty"),
        ({"variables": tf.Variable(1.0)}, "variables is a ResourceVariable, not a list"),
        ({"variables": [1.0]}, r"variables\[0\] is a float, not a variable"),
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
    ids=message_id,
)
def test_invalid_options(changes: Any, message: str) -> None:
    options = {"variables": [tf.Variable(1.0)]} | changes
    with pytest.raises(InputError, match=message):
        Accumulator(options.pop("variables"), **options)


def test_a_repeated_variable_is_refused() -> None:
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
            r"'b:0' has the shape \(1, 1\), but the variable has \(1,\)",
        ),
        (
            ([gradient(1.0), tf.ones(2, tf.float64)], 1),
            r"'b:0' has the shape \(2,\), but the variable has \(1,\)",
        ),
        (([gradient(1.0), tf.constant([1])], 1), "'b:0' has the dtype int32"),
        (([gradient(1.0), tf.constant([1j])], 1), "'b:0' has the dtype complex128"),
        (([gradient(1.0), "abc"], 1), r"gradient of 'b:0' has the shape \(\), but the variable"),
        (([gradient(1.0), tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))], 1), "a row of it"),
        (([gradient(1.0), None], -1), "weight -1 of a micro-batch"),
        (([gradient(1.0), None], NAN), "weight nan of a micro-batch"),
        (([gradient(1.0), None], True), "weight True of a micro-batch"),
        (([gradient(1.0), None], tf.constant([1.0, 2.0])), r"weight has the shape \(2,\)"),
        (([gradient(1.0), None], tf.constant(3.0, tf.bfloat16)), "weight has the dtype bfloat16"),
        (([gradient(1.0), None], "3"), "weight '3' of a micro-batch"),
        (
            ([gradient(1.0), None],),
            "add\\(\\) needs weight=.*Pass weight=len\\(rows\\) for a mean over rows",
        ),
    ],
    ids=message_id,
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
def test_a_bad_weight_in_a_graph_changes_nothing(bad: float) -> None:
    accumulator = Accumulator([one()])
    add = tf.function(lambda weight: accumulator.add([gradient(3.0)], weight))
    add(tf.constant(2.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite and not negative"):
        add(tf.constant(bad))
    add(tf.constant(1.0))
    assert float(accumulator.mean()[0][0]) == 3.0


def test_xla_skips_the_assertion_and_apply_finds_the_bad_weight() -> None:
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


def test_the_mean_of_a_window_of_weight_zero() -> None:
    accumulator = Accumulator([one()])
    with pytest.raises(WindowError, match="weight of this window is 0"):
        accumulator.mean()
    accumulator.add([gradient(1.0)], 0)
    with pytest.raises(WindowError, match="weight of this window is 0"):
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
def test_nonfinite_raise_discards_the_window(way: str) -> None:
    variables = [one(), tf.Variable([1.0], dtype=tf.float64, name="bad")]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    add = wrapped(lambda x, y: accumulator.add([x, y], 1), way)
    apply = wrapped(lambda: accumulator.apply(optimizer), way)
    add(gradient(1.0), gradient(float("inf")))
    add(gradient(1.0), gradient(1.0))
    expected: Any = NonFiniteError if way == "eager" else tf.errors.InvalidArgumentError
    where = "the first variable with a non-finite gradient is 'bad:0'" if way == "eager" else "is not finite"
    with pytest.raises(expected, match=where):
        apply()
    assert [float(v[0]) for v in variables] == [1.0, 1.0] and optimizer.iterations == 0
    add(gradient(0.5), gradient(0.25))
    assert apply().made
    assert [float(v[0]) for v in variables] == [0.5, 0.75]


@pytest.mark.parametrize("way", WAYS)
def test_nonfinite_skip_update_discards_the_window(way: str) -> None:
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


def test_a_window_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint contains sums and counters, but not the model, which has its own checkpoint."""
    batch, pairs = texts(LENGTHS), []
    for _ in range(2):
        variables = model()
        pairs.append((variables, Accumulator(variables)))
    (first, saved), (second, restored) = pairs
    head, tail = part(batch, 0, 5), part(batch, 5, 15)
    saved.add(gradients(first, head)[1], count(head))
    path = tf.train.Checkpoint(accumulator=saved).save(str(tmp_path / "window"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert len(names) == 4 + 1 + 2, names  # sums, counters; two of the checkpoint itself
    status = tf.train.Checkpoint(accumulator=restored).restore(path)
    status.assert_consumed()
    for variables, accumulator in pairs:
        accumulator.add(gradients(variables, tail)[1], count(tail))
        assert int(accumulator.apply(adam()).weight) == sum(LENGTHS)
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    assert_same([*first], [*second], model())


def test_a_graph_refuses_a_window_with_other_gradients_than_at_tracing() -> None:
    """`apply` is traced when only the second variable has had gradients."""
    variables = [one(), one()]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    apply = tf.function(lambda: accumulator.apply(optimizer))
    accumulator.add([None, gradient(0.5)], 1)
    apply()
    accumulator.add([gradient(0.5), gradient(0.5)], 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Call each function that calls"):
        apply()
    assert [float(v[0]) for v in variables] == [1.0, 0.5]
    accumulator.add([None, gradient(0.25)], 1)
    apply()
    assert [float(v[0]) for v in variables] == [1.0, 0.25]


def test_too_many_combinations_of_variables_for_a_graph() -> None:
    variables = [one() for _ in range(6)]
    accumulator, optimizer = Accumulator(variables), sgd(variables)
    for index in range(6):
        accumulator.add([gradient(1.0) if index == number else None for number in range(6)], 1)
    with pytest.raises(WindowError, match="more than 16 different sets"):
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
