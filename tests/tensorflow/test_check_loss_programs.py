# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""`check_loss` passes programs with a GradientTape whose update equals the large batch, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
import keras  # a dependency of TensorFlow

from superbatch.errors import CoupledSamplesError, LossSpecError, SplitError, SuperbatchError
from superbatch.tensorflow import Accumulator, checking
from tests.tensorflow.helpers import tf

pytestmark = pytest.mark.tensorflow
ROWS, PARTS = 23, (range(5), range(5, 13), range(13, 23))
draw = np.random.default_rng(5)
X, Y = draw.normal(size=(ROWS, 6)), np.abs(draw.normal(size=(ROWS, 4))) + 0.1
WEIGHTS = draw.uniform(0.2, 3.0, ROWS)
LENGTHS = draw.integers(1, 8, ROWS)
TOKENS, MASK = draw.integers(1, 9, size=(ROWS, 7)), (np.arange(7) < LENGTHS[:, None]).astype(float)
RAGGED = tf.RaggedTensor.from_row_lengths(np.arange(LENGTHS.sum()) % 9 + 1, LENGTHS)
LABELS = (draw.normal(size=(ROWS, 1)) > 0).astype(float)
MASK[5] = 0.0
layers = keras.layers


class Program(NamedTuple):
    """A model, its loss and batch, with the weight that the loop passes."""

    loss: Callable[..., Any]
    batch: tuple[Any, ...] = (X, Y)
    weight: Callable[..., Any] = lambda *batch: len(batch[0])
    reduction: Any = "mean"
    between: Callable[[], Any] | None = None
    embeds: bool = False


def dense(*, between: Any = None, dtype: str = "float64") -> Any:
    keras.utils.set_random_seed(3)
    options = {"dtype": dtype}
    middle = [] if between is None else [between()]
    return keras.Sequential(
        [
            keras.Input((6,), dtype="float64"),
            layers.Dense(5, "tanh", **options),
            *middle,
            layers.Dense(4, **options),
        ]
    )


def embedding() -> Any:
    keras.utils.set_random_seed(3)
    parts = [layers.Embedding(10, 5, dtype="float64"), layers.Dense(10, dtype="float64")]
    return keras.Sequential([keras.Input((7,), dtype="int64"), *parts])


def squares(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x) - y) ** 2, axis=-1)


def mean(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(squares(model, x, y))


def token_losses(model: Any, tokens: Any, mask: Any) -> Any:
    return mask * tf.nn.sparse_softmax_cross_entropy_with_logits(tokens, model(tokens))


def of_ragged(model: Any, ragged: Any) -> Any:
    hidden = model.layers[1](model.layers[0](ragged.flat_values))
    return tf.reduce_sum(hidden**2) / tf.cast(tf.size(ragged.flat_values), tf.float64)


def with_losses(model: Any, x: Any, y: Any) -> Any:
    return mean(model, x, y) + tf.add_n(model.losses)


def penalty(model: Any, x: Any, y: Any) -> Any:
    """Penalty on the gradient of each row's outputs with respect to its inputs."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
    return mean(model, x, y) + tf.reduce_mean((tf.norm(tape.gradient(outputs, x), axis=-1) - 1) ** 2)


def balanced(model: Any, x: Any, labels: Any) -> Any:
    """Loss with classes weighted by their share of the micro-batch."""
    share = tf.reduce_mean(labels)
    weight = tf.where(labels > 0.5, 1 / (share + 0.1), 1 / (1.1 - share))
    return tf.reduce_mean(weight * (model(x)[:, :1] - labels) ** 2)


def contrastive(model: Any, x: Any, _: Any) -> Any:
    found = tf.math.l2_normalize(model(x), -1)
    scores = tf.matmul(found, found, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(scores)[0]), scores)
    )


def weighted(model: Any, x: Any, y: Any, w: Any) -> Any:
    return tf.reduce_sum(w * squares(model, x, y)) / tf.reduce_sum(w)


def scaled(model: Any, x: Any, y: Any) -> Any:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    optimizer.build(model.trainable_variables)
    return optimizer.scale_loss(mean(model, x, y))


def regularized() -> Any:
    return layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l2", dtype="float64")


def count(*batch: Any) -> Any:
    return tf.reduce_sum(batch[-1])


TEXTS, RAGGED_ROWS = {"batch": (TOKENS, MASK), "embeds": True}, {"batch": (RAGGED,), "embeds": True}
RIGHT = {
    "a mean": Program(mean),
    "in a tf.function": Program(lambda model, x, y: tf.function(lambda *batch: mean(model, *batch))(x, y)),
    "a sum": Program(lambda *given: tf.reduce_sum(squares(*given)), reduction="sum"),
    "compute_average_loss": Program(lambda *given: tf.nn.compute_average_loss(squares(*given))),
    "compute_average_loss of a global batch": Program(
        lambda *given: tf.nn.compute_average_loss(squares(*given), global_batch_size=ROWS), reduction="sum"
    ),
    "regularizers": Program(with_losses, between=regularized),
    "BatchNormalization in inference": Program(
        mean, between=lambda: layers.BatchNormalization(dtype="float64")
    ),
    "a mean over tokens": Program(
        lambda *given: tf.reduce_sum(token_losses(*given)) / tf.reduce_sum(given[-1]), weight=count, **TEXTS
    ),
    "a sum over tokens": Program(
        lambda *given: tf.reduce_sum(token_losses(*given)), weight=count, reduction="sum", **TEXTS
    ),
    "a mean over rows of means over tokens": Program(
        lambda *given: tf.reduce_mean(
            tf.math.divide_no_nan(tf.reduce_sum(token_losses(*given), 1), tf.reduce_sum(given[-1], 1))
        ),
        **TEXTS,
    ),
    "sample weights": Program(
        lambda model, x, y, w: tf.reduce_mean(w * squares(model, x, y)), (X, Y, WEIGHTS)
    ),
    "a mean over weights": Program(weighted, (X, Y, WEIGHTS), weight=count),
    "a loss of Keras": Program(
        lambda model, x, y, w: keras.losses.MeanSquaredError(dtype="float64")(y, model(x), sample_weight=w),
        (X, Y, WEIGHTS),
    ),
    "a loss scale": Program(scaled),
    "a gradient penalty": Program(penalty),
    "a dict": Program(
        lambda model, batch: mean(model, batch["x"], batch["y"]),
        ({"x": X, "y": Y},),
        weight=lambda b: len(b["x"]),
    ),
    "a scalar next to the rows": Program(lambda model, x, y, t: t * mean(model, x, y), (X, Y, 0.5)),
    "no targets": Program(lambda model, x, _: tf.reduce_mean(model(x) ** 2), (X, None)),
    "ragged rows": Program(of_ragged, weight=lambda ragged: tf.size(ragged.flat_values), **RAGGED_ROWS),
}
ROW_MEAN, A_SUM = r"The loss is not a mean over rows: ", r"The loss is a sum, but the accumulator"
WRONG = {
    "a sum declared as a mean": (
        Program(lambda *given: tf.reduce_sum(squares(*given))),
        LossSpecError,
        A_SUM,
    ),
    "a number for each row": (Program(squares), LossSpecError, r"has the shape \(8,\), and tape\.gradient"),
    "a part of a global batch": (
        Program(lambda *given: tf.nn.compute_average_loss(squares(*given), global_batch_size=ROWS)),
        LossSpecError,
        A_SUM,
    ),
    "a regularizer plus a sum": (
        Program(lambda *g: with_losses(*g) + 9 * mean(*g) * len(g[1]), between=regularized, reduction="sum"),
        CoupledSamplesError,
        r"Leave out terms that are no sum over rows, as a regularizer in model\.losses",
    ),
    "BatchNormalization in training": (
        Program(
            lambda model, x, y: tf.reduce_mean((model(x, training=True) - y) ** 2),
            between=lambda: layers.BatchNormalization(dtype="float64"),
        ),
        LossSpecError,
        ROW_MEAN,
    ),
    "contrastive": (Program(contrastive), LossSpecError, ROW_MEAN),
    "tokens weighted by rows": (
        Program(lambda *given: tf.reduce_sum(token_losses(*given)) / tf.reduce_sum(given[-1]), **TEXTS),
        LossSpecError,
        ROW_MEAN,
    ),
    "weights counted by rows": (Program(weighted, (X, Y, WEIGHTS)), LossSpecError, ROW_MEAN),
    "a root of a mean": (Program(lambda *given: tf.sqrt(mean(*given))), LossSpecError, ROW_MEAN),
    "classes by their share": (Program(balanced, (X, LABELS)), LossSpecError, ROW_MEAN),
    "the two hardest rows": (
        Program(lambda *given: tf.reduce_mean(tf.math.top_k(squares(*given), 2)[0])),
        LossSpecError,
        ROW_MEAN,
    ),
    "ragged tokens counted by rows": (
        Program(of_ragged, weight=lambda ragged: ragged.nrows(), **RAGGED_ROWS),
        LossSpecError,
        ROW_MEAN,
    ),
}


def made(program: Program) -> tuple[Any, Callable[..., Any]]:
    model = embedding() if program.embeds else dense(between=program.between)
    return model, lambda *batch: program.loss(model, *batch)


def difference(program: Program) -> float:
    """Return the relative difference between the gradient from three micro-batches and that of the batch."""
    model, loss = made(program)
    variables = model.trainable_variables
    accumulator = Accumulator(variables, reduction=program.reduction)

    def gradients(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(*batch)
        return tape.gradient(value, variables)

    for part in PARTS:
        batch = checking._rows_of(program.batch, [*part])
        accumulator.add(gradients(batch), program.weight(*batch))
    divisor = float(program.weight(*program.batch)) if program.reduction == "sum" else 1.0
    found = gradients(checking._rows_of(program.batch, [*range(ROWS)]))
    whole = [np.array(tf.convert_to_tensor(each)) / divisor for each in found]
    apart = [
        np.abs(got - wanted).max()
        for got, wanted in zip(map(np.array, accumulator.mean()), whole, strict=True)
    ]
    return max(apart) / max(np.abs(each).max() for each in whole)


def check(program: Program) -> None:
    model, loss = made(program)
    accumulator = Accumulator(model.trainable_variables, reduction=program.reduction)
    accumulator.check_loss(loss, *program.batch, weight=program.weight)


@pytest.mark.parametrize("name", RIGHT)
def test_programs_that_equal_the_large_batch_pass(name: str) -> None:
    assert difference(RIGHT[name]) < 1e-14, "the premise"
    check(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_programs_with_another_update_raise(name: str) -> None:
    program, kind, words = WRONG[name]
    assert difference(program) > 2e-4, "the premise"
    with pytest.raises(kind, match=words):
        check(program)


def test_mutant_with_one_comparison_misses_agreement_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of a few rows have equal label shares in some of the comparisons."""
    labels = np.zeros((ROWS, 1))
    labels[[0, 2, 3, 20]] = 1.0
    program = Program(balanced, (X, labels))
    assert difference(program) > 1e-3, "the premise"
    with pytest.raises(LossSpecError, match=ROW_MEAN):
        check(program)
    shares = []
    for turn in range(checking.TURNS):
        spread = checking.spread_rows(ROWS, checking.ROWS, turn, checking.TURNS)
        shares.append([float(labels[some].mean()) for some in (spread[:5], spread[5:])])
    assert any(one != other for one, other in shares)
    monkeypatch.setattr(checking, "TURNS", 1)
    monkeypatch.setattr(checking, "spread_rows", lambda *_: [0, 1, 4, 5, 6, 2, 7, 8])
    with pytest.raises(LossSpecError):
        check(program)  # micro-batches of five and of three
    monkeypatch.setattr(checking, "spread_rows", lambda *_: [1, 4, 5, 6, 7, 8, 9, 10])
    check(program)


def test_a_sparse_tensor_is_refused() -> None:
    model = dense()
    batch = (tf.sparse.from_dense(X), Y)
    with pytest.raises(SplitError, match=r"SparseTensor of shape \(23, 6\)\. Pass tf\.sparse\.to_dense"):
        Accumulator(model.trainable_variables).check_loss(
            lambda x, y: mean(model, tf.sparse.to_dense(x), y), *batch, weight=lambda x, y: len(y)
        )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_rounding_of_mixed_precision_passes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of micro-batches in mixed precision differ by up to 2 %."""
    x, y = X.astype("float32"), Y.astype("float32")
    model = dense(dtype=policy)
    loss = lambda x, y: keras.losses.MeanSquaredError(dtype="float32")(y, model(x))  # noqa: E731
    accumulator = Accumulator(model.trainable_variables)
    accumulator.check_loss(loss, x, y, weight=lambda x, y: len(x))
    with pytest.raises(LossSpecError, match=A_SUM):
        accumulator.check_loss(
            lambda x, y: tf.reduce_sum((tf.cast(model(x), tf.float32) - y) ** 2),
            x,
            y,
            weight=lambda x, y: len(x),
        )
    if policy == "mixed_bfloat16":  # the mutant: the bound of float32
        monkeypatch.setattr(checking, "SHORT", {})
        with pytest.raises(SuperbatchError):
            accumulator.check_loss(loss, x, y, weight=lambda x, y: len(x))


def test_python_weights_are_float64() -> None:
    """`tf.cast` would round a Python number to float32 first."""
    variable = tf.Variable([1.0], dtype=tf.float64)
    accumulator = Accumulator([variable])
    for weight, gradient in ((0.1, 3.0), (0.7, 5.0)):
        accumulator.add([tf.constant([gradient], tf.float64)], weight, loss=tf.constant(gradient, tf.float64))
    wanted = (0.1 * 3.0 + 0.7 * 5.0) / (0.1 + 0.7)
    assert float(accumulator.mean()[0][0]) == pytest.approx(wanted, rel=1e-15)
    applied = accumulator.apply(keras.optimizers.SGD(0.0))
    assert float(applied.loss) == pytest.approx(wanted, rel=1e-15)
    assert float(applied.weight) == pytest.approx(0.8, rel=1e-15)
