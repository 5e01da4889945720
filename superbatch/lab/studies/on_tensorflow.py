# TensorFlow is an extra. Pyright reads stubs, which describe a part of it only:
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Backend TensorFlow of a comparison: each update is a `tf.function` with a loop over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import tensorflow as tf

from superbatch.errors import InputError
from superbatch.tensorflow import Accumulator

from ..recipes import Recipe
from ..recipes.digits_data import digits_elsewhere, initial_weights
from .backends import Backend
from .setting import WRONG, ArmSpec, Method, Setting
from .without_torch import Steps, optimizers_of, restore, trainer

OPTIMIZERS = optimizers_of(tf.keras)
HOW: Mapping[Method, str] = {
    "real batch": "the whole batch at once, tf.GradientTape",
    "accumulator": "superbatch.tensorflow.Accumulator",
    **WRONG,
}
MEMORY = "Peak memory is left out: TensorFlow does not report the allocations of an update on the CPU."


@dataclass(frozen=True)
class Program:
    """Program that makes the updates of one method. It is traced once and used for all runs."""

    weights: dict[str, Any]  # name -> variable
    optimizer: Any  # of these variables
    # (images, labels, boundaries of the micro-batches, share of the window) -> the batch's mean loss
    update: Any
    start: list[Any]  # values of the optimizer's variables before the first update

    def begin(self, seed: int) -> None:
        """Reset the weights to the initial ones of a seed, and the optimizer."""
        for name, values in initial_weights(seed).items():
            self.weights[name].assign(tf.cast(values, self.weights[name].dtype))
        restore(self.optimizer, self.start)


def mean_loss(weights: Mapping[str, Any], images: Any, labels: Any) -> Any:
    """Return the mean cross entropy of a batch or micro-batch."""
    hidden = tf.nn.relu(tf.matmul(images, weights["0.weight"], transpose_b=True) + weights["0.bias"])
    scores = tf.matmul(hidden, weights["2.weight"], transpose_b=True) + weights["2.bias"]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


@cache
def program(method: Method, optimizer: str, learning_rate: float, dtype: str) -> Program:
    """Return the program of a method, with new variables and optimizer."""
    weights = {name: tf.Variable(tf.cast(values, dtype)) for name, values in initial_weights(0).items()}
    # Keras rounds a learning rate given as a number to float32, but not one that a function returns.
    rule = OPTIMIZERS[optimizer](learning_rate=lambda: tf.constant(learning_rate, dtype))
    rule.build(list(weights.values()))
    make = _whole if method == "real batch" else partial(_in_parts, method=method)
    shapes = [
        tf.TensorSpec([None, 64], dtype),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([], dtype),
    ]
    update = tf.function(make(weights, rule), input_signature=shapes)
    return Program(weights, rule, update, [variable.numpy() for variable in rule.variables])


def _whole(weights: dict[str, Any], optimizer: Any) -> Callable[..., Any]:
    """Return the function that makes an update from the batch in one piece."""

    def update(images: Any, labels: Any, ends: Any, share: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(weights, images, labels)
        variables = list(weights.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return update


def _in_parts(weights: dict[str, Any], optimizer: Any, *, method: Method) -> Callable[..., Any]:
    """Return the function that makes an update from micro-batches, with the weights of the method."""
    variables = list(weights.values())
    accumulator = Accumulator(variables)

    def update(images: Any, labels: Any, ends: Any, share: Any) -> Any:
        total = tf.zeros((), images.dtype)
        for index in tf.range(tf.size(ends) - 1):
            rows = slice(ends[index], ends[index + 1])
            count = ends[index + 1] - ends[index]
            with tf.GradientTape() as tape:
                loss = mean_loss(weights, images[rows], labels[rows])
            gradients = tape.gradient(loss, variables)
            if method == "fixed tail divisor":
                gradients = [share * gradient for gradient in gradients]
            accumulator.add(gradients, weight=tf.ones_like(count) if method == "mean of means" else count)
            total += loss * tf.cast(count, loss.dtype)
        accumulator.apply(optimizer)
        return total / tf.cast(ends[-1], total.dtype)

    return update


def _begin(recipe: Recipe, setting: Setting, arm: ArmSpec, seed: int) -> Steps:
    of_arm = program(arm.method, setting.optimizer, setting.learning_rate, setting.dtype)
    of_arm.begin(seed)
    return Steps(
        lambda indices: _arguments(recipe, setting, arm, indices),
        lambda arguments: float(of_arm.update(*arguments)),
        lambda: of_arm.weights,
    )


def _arguments(recipe: Recipe, setting: Setting, arm: ArmSpec, indices: Any) -> tuple[Any, ...]:
    images, labels = recipe.batch(indices)
    sizes = arm.split.sizes_of(len(labels))
    return (
        tf.constant(images, setting.dtype),
        tf.constant(labels, tf.int32),
        tf.constant([0, *accumulate(sizes)], tf.int32),
        tf.constant(len(sizes) / len(arm.split.sizes), setting.dtype),
    )


def load(name: str, data: str | Path | None) -> Recipe:
    """Return the digits task; raise `InputError` if Keras is not set to TensorFlow."""
    keras = tf.keras.backend.backend()
    if keras != "tensorflow":
        raise InputError(
            f"backend='tensorflow' with KERAS_BACKEND={keras}: its optimizers are those of Keras, which must "
            "be set to tensorflow. Unset KERAS_BACKEND, or use the backend keras."
        )
    return digits_elsewhere()


BACKEND = Backend(
    title="tensorflow",
    load=load,
    train=trainer(_begin),
    how=HOW,
    versions=lambda: {"tensorflow": tf.__version__, "keras": tf.keras.__version__},
    notes=(MEMORY,),
)
