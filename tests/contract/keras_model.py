# Keras is an extra. If it is not installed, pyright cannot resolve it; if it is, pyright infers wrong types
# for its untyped functions:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Model, loss and optimizer of the contract in Keras, in float64 on every backend.

Keras computes `matmul` in float32 on torch, `tanh` in float32 on JAX, and learning rates in float32.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops


def native() -> tuple[Any, Any]:
    """Return `matmul` and `tanh` of the backend itself."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.matmul, torch.tanh
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.matmul, jnp.tanh
    import tensorflow as tf

    return (lambda a, b: tf.tensordot(a, b, 1)), tf.tanh


class Contract(keras.layers.Layer):
    """``tanh(x w) v``, or ``x w``."""

    def __init__(self, start: dict[str, Any]) -> None:
        super().__init__()
        self.p = {
            name: self.add_weight(
                shape=value.shape, initializer=keras.initializers.Constant(value), name=name
            )
            for name, value in start.items()
        }

    def call(self, x: Any) -> Any:
        matmul, tanh = native()
        p = {name: ops.convert_to_tensor(variable) for name, variable in self.p.items()}
        return matmul(tanh(matmul(x, p["w"])), p["v"]) if "v" in p else matmul(x, p["w"])


class Squared(keras.losses.Loss):
    """Squared error of each row or token."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return (y_pred - y_true) ** 2


class Output(keras.losses.Loss):
    """Loss that returns the output itself."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


class Momentum(keras.optimizers.Optimizer):
    """SGD with PyTorch's rules: the rate multiplies the velocity; clipping adds an epsilon to the norm."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(learning_rate=0.0)
        self.case = case

    def build(self, variables: Any) -> None:
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def _clip_gradients(self, grads: Any) -> Any:
        clip = self.case["clip"]
        if not clip:
            return grads
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in grads))
        factor = clip["norm"] / (norm + clip["epsilon"])
        return [gradient * ops.where(factor < 1, factor, ops.ones_like(factor)) for gradient in grads]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        velocity = self.velocities[self._get_variable_index(variable)]
        rates = ops.convert_to_tensor(np.array([*self.case["rates"], 0.0]), dtype="float64")
        now = ops.equal(ops.arange(len(self.case["rates"]) + 1), ops.convert_to_tensor(self._iterations))
        rate = ops.cast(ops.sum(ops.where(now, rates, ops.zeros_like(rates))), variable.dtype)
        velocity.assign(ops.convert_to_tensor(velocity) * self.case["momentum"] + gradient)
        variable.assign(ops.convert_to_tensor(variable) - rate * ops.convert_to_tensor(velocity))


def build(case: dict[str, Any], start: dict[str, Any]) -> Any:
    """Return the compiled model."""
    x = case_shape(case)
    model = keras.Sequential([keras.Input(x), Contract(start)])
    reduction = "sum" if case["reduction"] == "sum" else "mean_with_sample_weight"
    loss = (Squared if case["model"] == "tanh" else Output)(reduction=reduction)
    model.compile(Momentum(case), loss=loss)
    return model


def case_shape(case: dict[str, Any]) -> tuple[int, ...]:
    features = 1 if case["model"] == "linear" else 3
    return (4, features) if case["lengths"] else (features,)


def batch(case: dict[str, Any], rows: dict[str, Any]) -> tuple[Any, ...]:
    """Return x, y and sample weights of a window as tensors: Keras on torch converts arrays to float32."""
    weight = rows["mask"]
    if case["reduction"] == "sum":
        weight = weight / weight.sum()  # weights that add up to 1 make a mean of a sum
    found = [rows["x"], rows["y"], weight]
    if not case["lengths"] and case["reduction"] != "sum":
        found.pop()
    return tuple(ops.convert_to_tensor(part, dtype="float64") for part in found)


def parameters(model: Any) -> dict[str, Any]:
    return {
        variable.name: np.array(ops.convert_to_numpy(ops.cast(variable, "float64")))
        for variable in model.trainable_variables
    }
