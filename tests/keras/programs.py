# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Layers, losses and data of the table of programs in `cases_programs`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

ROWS, CLASSES = 12, 4
draw = np.random.default_rng(4)  # not shared, so that the data do not depend on other case files
X = draw.normal(size=(ROWS, 3))
Y = np.abs(draw.normal(size=(ROWS, CLASSES))) + 0.1
SHARES = Y / Y.sum(axis=-1, keepdims=True)
LABELS = np.arange(ROWS) % 3
BINARY = (draw.normal(size=(ROWS, CLASSES)) > 0).astype(float)
SEQUENCES = draw.normal(size=(ROWS, 6, 3))
IMAGES = draw.normal(size=(ROWS, 4, 4, 2))
# Known targets: their number differs between rows, and one row has none.
KNOWN = np.where(np.arange(CLASSES) < draw.integers(1, CLASSES + 1, size=ROWS)[:, None], Y, -1.0)
KNOWN[7] = -1.0


@dataclass(frozen=True)
class Program:
    """One small program: `build` returns a compiled model, `x` and `y` are its data."""

    build: Any
    x: Any = field(default_factory=lambda: X)
    y: Any = field(default_factory=lambda: Y)
    options: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)


def mlp(*between: Any, loss: Any = "mse", activation: Any = None, **compiled: Any) -> Any:
    """Return a model of two Dense layers; `between` makes the layers between them."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, activation="softsign"), *[make() for make in between]]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(CLASSES, activation=activation)])
    model.compile(keras.optimizers.SGD(0.3), loss=loss, **compiled)
    return model


class Centre(keras.layers.Layer):
    """Subtract the mean over the batch."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


class Standardise(keras.layers.Layer):
    """Divide by the largest value of the batch."""

    def call(self, x: Any) -> Any:
        return x / ops.max(ops.abs(x))


class AcrossRows(keras.layers.Layer):
    """Attention of each row to all rows."""

    def call(self, x: Any) -> Any:
        return x + ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


class ZeroGate(keras.layers.Layer):
    """A centred branch with an initial gate of 0: it changes the gradient, not the output."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(), initializer="zeros", name="gate")

    def call(self, x: Any) -> Any:
        return x + self.gate * (x - ops.mean(x, axis=0, keepdims=True))


class Adds(keras.layers.Layer):
    """Add a function of the input to the loss."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        self.add_loss(self.function(x))
        return x


class Counts(keras.layers.Layer):
    """A moving mean of the inputs, which each forward in training changes."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x


class SetsAConstant(Counts):
    """A variable that has the same value after any number of forwards."""

    def call(self, x: Any, training: bool = False) -> Any:
        self.mean.assign(ops.ones(tuple(self.mean.shape), x.dtype))
        return x + 0 * self.mean


def contrastive(y_true: Any, y_pred: Any) -> Any:
    """One number for each row, computed from all rows."""
    scores = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.logsumexp(scores, axis=-1) - ops.sum(y_true * y_pred, axis=-1)


def against_the_mean(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_pred - ops.mean(y_true, axis=0, keepdims=True)) ** 2, axis=-1)


def pairs(y_true: Any, y_pred: Any) -> Any:
    """Hinge of the difference of rows 2 i and 2 i + 1: both rows get the number of their pair."""
    first, second = y_pred[::2], y_pred[1::2]
    each = ops.sum(ops.relu(1.0 - (first - second)), axis=-1)
    return ops.repeat(each, 2, axis=0) + 0 * ops.sum(y_true, axis=-1)


def known_mean(y_true: Any, y_pred: Any) -> Any:
    known = ops.cast(y_true > -1, y_pred.dtype)
    return ops.sum(known * (y_pred - y_true) ** 2) / ops.sum(known)


def known_sum(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.cast(y_true > -1, y_pred.dtype) * (y_pred - y_true) ** 2)


def count_known(x: Any, y: Any, sample_weight: Any) -> Any:
    return ops.sum(ops.cast(y > -1, "float32"))


def count_rows(x: Any, y: Any, sample_weight: Any) -> Any:
    return ops.shape(y)[0]


class OwnLoss(keras.Model):
    """Model whose `compute_loss` is a mean over rows."""

    def __init__(self, per_row: Any = None) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.per_row = per_row

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return ops.mean(self.per_row(y, y_pred))


def own(per_row: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = OwnLoss(per_row)
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.3))
    return model


def squares(y_true: Any, y_pred: Any) -> Any:
    return ops.sum((y_pred - y_true) ** 2, axis=-1)


def known_each(y_true: Any, y_pred: Any) -> Any:
    """One number for each row: a masked sum, divided by a constant."""
    return ops.sum(ops.cast(y_true > -1, y_pred.dtype) * (y_pred - y_true) ** 2, axis=-1) / CLASSES


class Sampled(keras.layers.Layer):
    """Noise of a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        noise = keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seed_generator)
        self.add_loss(ops.mean(x**2))
        return x + ops.exp(x) * noise


class DrawsByItself(keras.layers.Layer):
    """Random numbers drawn by the backend instead of `keras.random`."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        name = keras.backend.backend()
        if name == "jax":
            import jax

            return x + jax.random.normal(self.seed_generator.next(), x.shape, x.dtype)
        if name == "tensorflow":
            import tensorflow as tf

            return x + tf.random.normal(tf.shape(x), dtype=x.dtype)
        import torch

        return x + torch.randn_like(x)


class Scores(keras.layers.Layer):
    """Products of all pairs of rows, with as many columns as rows."""

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(x))


class Attends(keras.Model):
    """Each row attends to all rows of the batch, or is scored against them."""

    def __init__(self, *, only_scores: bool) -> None:
        super().__init__()
        self.dense, self.scores = keras.layers.Dense(CLASSES), Scores()
        self.only_scores = only_scores

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        hidden = self.dense(x)
        scores = self.scores(hidden)
        return scores if self.only_scores else ops.matmul(ops.softmax(scores), hidden)


def attending(loss: Any = "mse") -> Any:
    keras.utils.set_random_seed(1)
    model = Attends(only_scores=loss != "mse")
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.1), loss=loss)
    return model


def among_the_batch(y_true: Any, y_pred: Any) -> Any:
    return ops.logsumexp(y_pred, axis=-1) + 0 * ops.sum(y_true, axis=-1)


def functional(inputs: Any, outputs: Any, loss: Any = "mse", **compiled: Any) -> Any:
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), loss=loss, **compiled)
    return model


def recurrent(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 3))
    hidden = keras.layers.LSTM(4, return_sequences=True, **options)(inputs)
    hidden = keras.layers.MultiHeadAttention(2, 2, **({"dropout": 0.3} if options else {}))(hidden, hidden)
    return functional(inputs, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(hidden)))


def images() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 4, 2))
    hidden = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    hidden = keras.layers.GroupNormalization(2)(hidden)
    return functional(inputs, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(hidden)))


def without_targets() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3), Adds(lambda x: ops.mean((x - 1) ** 2))]
    )
    model.compile(keras.optimizers.SGD(0.1))
    return model


def normed() -> Any:
    return mlp(keras.layers.BatchNormalization)


class Unused(keras.Model):
    """A coupled output without a loss, which trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        y = self.dense(x)
        return {"used": y, "seen": y - ops.mean(y, axis=0, keepdims=True)}


def unused() -> Any:
    keras.utils.set_random_seed(1)
    model = Unused()
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.1), loss={"used": "mse"})
    return model
