# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""The contract on TensorFlow: `superbatch.tensorflow.Accumulator`, eager and in two graphs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from superbatch.tensorflow import Accumulator
from tests.contract import reference

WAYS = ["eager", "function"]


def can(case: dict[str, Any], way: str) -> bool:
    return True


def loss_of(case: dict[str, Any], p: dict[str, Any], microbatch: dict[str, Any]) -> Any:
    if "v" not in p:
        return tf.reduce_mean(tf.linalg.matvec(microbatch["x"], p["w"]))
    error = tf.linalg.matvec(tf.tanh(microbatch["x"] @ p["w"]), p["v"]) - microbatch["y"]
    total = tf.reduce_sum(error**2 * (microbatch["mask"] + case["background"]))
    return total if case["reduction"] == "sum" else total / tf.reduce_sum(microbatch["mask"])


class Clipped:
    """Optimizer that clips as PyTorch does, with an epsilon, which `tf.clip_by_global_norm` lacks."""

    def __init__(self, optimizer: Any, clip: dict[str, float]) -> None:
        self.optimizer, self.clip = optimizer, clip

    def apply_gradients(self, pairs: Any) -> None:
        norm = tf.linalg.global_norm([gradient for gradient, _ in pairs])
        factor = tf.minimum(tf.ones_like(norm), self.clip["norm"] / (norm + self.clip["epsilon"]))
        self.optimizer.apply_gradients([(factor * gradient, variable) for gradient, variable in pairs])


class Momentum(keras.optimizers.Optimizer):
    """SGD of the reference; in Keras' SGD the rate is inside the velocity."""

    def __init__(self, rates: list[float], momentum: float) -> None:
        super().__init__(learning_rate=Rates(tf.constant(rates, tf.float64)))
        self.momentum, self.velocities = momentum, []

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(v, name="velocity") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        velocity: Any = self.velocities[self._get_variable_index(variable)]
        velocity.assign(self.momentum * velocity + gradient)
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * velocity)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """One rate per update, in float64."""

    def __init__(self, rates: Any) -> None:
        self.rates = rates

    def __call__(self, step: Any) -> Any:
        return self.rates[tf.cast(step, tf.int32)]


class Training:
    """Variables, optimizer and moving average of one case."""

    def __init__(self, case: dict[str, Any], way: str) -> None:
        self.case = case
        self.dtype = tf.as_dtype(case["dtype"])
        start = reference.parameters(case)
        self.p = {name: tf.Variable(tf.constant(value, self.dtype)) for name, value in start.items()}
        self.sgd = Momentum([*case["rates"], 0.0], case["momentum"])
        self.sgd.build(list(self.p.values()))
        self.optimizer = Clipped(self.sgd, case["clip"]) if case["clip"] else self.sgd
        self.accumulator = Accumulator(
            list(self.p.values()), reduction=case["reduction"], nonfinite=case["nonfinite"] or "raise"
        )
        self.add: Any = self._add
        self.apply: Any = self._apply
        if way == "function":
            self.add = tf.function(self._add, reduce_retracing=True)
            self.apply = tf.function(self._apply)

    def _add(self, microbatch: dict[str, Any]) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(self.case, self.p, microbatch)
        found = tape.gradient(loss, list(self.p.values()))
        mask = tf.cast(microbatch["mask"], tf.float64)
        weight = tf.reduce_sum(mask) if self.case["lengths"] else tf.shape(mask)[0]
        self.accumulator.add(found, weight, loss=loss)

    def _apply(self) -> Any:
        return self.accumulator.apply(self.optimizer)


def run(case: dict[str, Any], way: str) -> dict[str, Any]:
    """Train; return losses, updates, parameters and their average, as lists."""
    training = Training(case, way)
    arrays = reference.data(case)
    average = {name: value.numpy().astype(np.float64) for name, value in training.p.items()}
    losses: list[float] = []
    start = 0
    for sizes in case["windows"]:
        for size in sizes:
            rows = {name: array[start : start + size] for name, array in arrays.items()}
            training.add({name: tf.constant(array, training.dtype) for name, array in rows.items()})
            start += size
        applied = training.apply()
        losses.append(float(applied.loss))
        if applied.made:
            for name, value in training.p.items():
                average[name] = case["ema"] * average[name] + (1 - case["ema"]) * value.numpy()
    return {
        "losses": losses,
        "updates": int(training.sgd.iterations),
        "parameters": {name: value.numpy().astype(np.float64).tolist() for name, value in training.p.items()},
        "average": {name: value.tolist() for name, value in average.items()},
    }
