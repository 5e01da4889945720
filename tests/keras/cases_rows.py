# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Losses whose numbers depend on all rows are refused for any micro-batch size; other losses are accepted.

With one or two rows the number of values alone does not identify such a loss.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from superbatch.errors import LossSpecError
from superbatch.keras import accumulate, rowwise
from tests.keras import helpers
from tests.keras.cases_exact import Halving, count_known
from tests.keras.cases_mutants import rejects
from tests.keras.helpers import LABELS, SOME, compare, cross_entropy, draw, raises, text

ROWS, CLASSES = 5, 4
X, Y = draw.normal(size=(ROWS, 3)), np.abs(draw.normal(size=(ROWS, CLASSES))) + 0.1
SIZES = (1, 2, 5)  # micro-batches of 1 1 1 1 1, of 2 2 1, and of 5
REFUSAL = "each number depends on all rows of a micro-batch"
losses = keras.losses


def model(loss: Any, classes: int = CLASSES, *, activation: Any = "sigmoid", **compiled: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(classes, activation=activation)]
    built = keras.Sequential(layers)
    built.compile(keras.optimizers.SGD(0.3), loss=loss, **compiled)
    return built


def for_each_class(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_true - y_pred) ** 2, axis=0)


def for_all(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_true - y_pred) ** 2, axis=(0, 1), keepdims=True)[0]


def for_each_pair(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_true[:, None] - y_pred[None]) ** 2, axis=-1)


def for_each_pair_flat(y_true: Any, y_pred: Any) -> Any:
    return ops.reshape(for_each_pair(y_true, y_pred), (-1,))


def refused(loss: Any, x: Any, y: Any, size: int) -> None:
    # Without the check of values (`cases_programs`), so the shapes alone must show it.
    ours = accumulate(model(loss, y.shape[-1]), microbatch_size=size, check=False)
    raises(LossSpecError, REFUSAL, lambda: ours.fit(x, y, batch_size=len(x), shuffle=False, verbose=0))


def refused_at_every_size(loss: Any) -> None:
    for size in SIZES:
        refused(loss, X, Y, size)


def case_one_number_for_each_class() -> None:
    refused_at_every_size(for_each_class)


def case_as_many_numbers_as_rows() -> None:
    """A number for each class, with as many rows as classes in the batch or micro-batch, or half as many."""
    x, y = draw.normal(size=(CLASSES, 3)), Y[:CLASSES]
    for size in (1, 2, 4):
        refused(for_each_class, x, y, size)


def case_one_number_in_an_array() -> None:
    refused_at_every_size(for_all)


def case_a_number_for_each_pair() -> None:
    for loss in (for_each_pair, for_each_pair_flat):
        refused_at_every_size(loss)


def case_batches_of_a_static_size() -> None:
    """TensorFlow knows the number of rows with `drop_remainder=True`."""
    if helpers.BACKEND != "tensorflow":
        return
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(CLASSES, drop_remainder=True)
    for loss in (for_each_class, for_each_pair):
        ours = accumulate(model(loss), microbatch_size=2, check=False)
        raises(LossSpecError, REFUSAL, lambda ours=ours: ours.fit(data, shuffle=False, verbose=0))


def case_a_number_for_some_rows() -> None:
    """The loss omits rows depending on the data, so only the affected batch is refused."""
    if helpers.BACKEND != "torch":  # compiled, JAX refuses such code, and TensorFlow does not know the shape
        return
    seen = lambda y_true, y_pred: ops.sum((y_true - y_pred) ** 2, axis=-1)[y_true[:, 0] > 0]  # noqa: E731
    for number, size in ((4, 1), (3, 2), (1, 5)):
        y = Y.copy()
        y[number, 0] = -1.0
        refused(seen, X, y, size)


ORDINARY = [
    losses.MeanSquaredError(),
    losses.MeanAbsoluteError(reduction="sum"),
    losses.Huber(),
    losses.LogCosh(),
    losses.KLDivergence(),
    losses.Poisson(),
    losses.CosineSimilarity(),
    losses.CategoricalHinge(),
    losses.BinaryCrossentropy(label_smoothing=0.1),
    losses.BinaryFocalCrossentropy(),
    losses.CategoricalCrossentropy(),
    losses.CategoricalFocalCrossentropy(),
    lambda y_true, y_pred: ops.square(y_true - y_pred),  # one number for each element
    lambda y_true, y_pred: ops.reshape(ops.square(y_true - y_pred), (-1,)),
    lambda y_true, y_pred: ops.sum(ops.square(y_true - y_pred), axis=-1, keepdims=True),
]


def same(build: Any, *arguments: Any, **options: Any) -> None:
    for size in SIZES:
        compare(build, *arguments, microbatch_size=size, batch_size=ROWS, epochs=1, moves=False, **options)


def case_ordinary_losses() -> None:
    y = Y / Y.sum(axis=-1, keepdims=True)
    for loss in ORDINARY:
        # Several losses of Keras compute in float32 on JAX and torch for any input dtype.
        bound = None if helpers.BACKEND == "tensorflow" else 5e-6
        same(lambda loss=loss: model(loss, run_eagerly=True), X, y, bound=bound)


def case_labels_and_a_single_row() -> None:
    labels, one = np.arange(ROWS) % CLASSES, (Y[:, 0] > 0.5).astype(float)
    build = lambda: model(cross_entropy(), activation=None)  # noqa: E731
    same(build, X, labels)
    same(build, X, labels[:, None])
    same(lambda: model("binary_crossentropy", 1), X, one)
    compare(lambda: model("mse"), X[:1], Y[:1], microbatch_size=2, batch_size=1)


def case_sequences_with_a_mask() -> None:
    same(lambda: text(cross_entropy()), SOME[:ROWS], LABELS[:ROWS])
    ignored = np.where(SOME == 0, -1, LABELS)
    same(lambda: text(cross_entropy(ignore_class=-1)), SOME[:ROWS], ignored[:ROWS])


def case_one_number_with_a_declared_weight() -> None:
    same(lambda: model(Halving()), X, Y, options={"loss_weight": count_known})


class NeedsNumbers(losses.Loss):
    """Loss that needs concrete values: it converts a tensor to a Python float."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        scale = 1.0 if float(ops.max(y_true)) > -1e9 else 0.0
        return ops.sum((y_true - y_pred) ** 2, axis=-1) * scale


class OfClasses(NeedsNumbers):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.sum(super().call(y_true, y_pred)) * ops.ones((CLASSES,), y_pred.dtype)


def case_a_loss_that_needs_concrete_values() -> None:
    if helpers.BACKEND != "torch":  # the other backends trace every loss
        return
    same(lambda: model(NeedsNumbers()), X, Y)
    refused_at_every_size(OfClasses())


def case_mutant_one_check() -> None:
    never = lambda *arguments: None  # noqa: E731
    rejects(rowwise, "check_twice", never, case_a_number_for_each_pair)
    if helpers.BACKEND != "tensorflow":  # it does not know the number of rows and refuses this loss anyway
        rejects(rowwise, "check_twice", never, case_as_many_numbers_as_rows)


def case_mutant_no_check_of_later_batches() -> None:
    if helpers.BACKEND == "torch":
        rejects(rowwise, "check_like", lambda *arguments: None, case_a_number_for_some_rows)
