# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""`tf.distribute` inside a train step: sums over replicas, and clipping of the summed gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import InputError
from . import forward, refusals


def several() -> bool:
    """Return True if the step runs on several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def check(model: Any) -> None:
    """Raise for models that cannot be trained exactly on several replicas.

    Raises:
        InputError: the model has BatchNormalization in training, or overrides `compute_loss`.
    """
    if not several():
        return
    if refusals.batchnorms(model):
        raise InputError(
            "The model has BatchNormalization in training on several replicas, and TensorFlow cannot write "
            "its moving statistics inside the loop of a replica. Freeze it (layer.trainable = False) or use "
            "GroupNormalization."
        )
    if forward.owns_compute_loss(model):
        raise InputError(
            f"The model {model.name!r} overrides compute_loss and trains on several replicas, and it is "
            "not known whether the override divides by their number. Compile a loss instead."
        )


def summed(value: Any) -> Any:
    """Return the sum over replicas of a tensor, or of each tensor in a list, in one collective."""
    if not several():
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def share(value: Any) -> Any:
    """Return a value that is equal on all replicas, divided by their number: the shares sum to the value."""
    if not several():
        return value
    return value / tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, value.dtype)


def gradients_to_apply(optimizer: Any, gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Return the gradients to pass to the optimizer on this replica.

    Keras' optimizer clips the gradient of each replica and sums afterwards. If it clips, the gradient is
    summed here first and clipped by the optimizer's own rule. Each replica then passes its share of the
    result: a share is below every threshold, and the shares sum to the clipped gradient.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not several() or not (inner.clipnorm or inner.global_clipnorm or inner.clipvalue):
        return gradients
    scale = optimizer.scale_loss(tf.ones(()))
    present = [number for number, gradient in enumerate(gradients) if gradient is not None]
    total = summed([gradients[number] for number in present])
    # The thresholds are for the gradient without the loss scale.
    unscaled = [gradient / tf.cast(scale, gradient.dtype) for gradient in total]
    clipped = inner._clip_gradients(unscaled)
    ready = list(gradients)
    for number, gradient in zip(present, clipped, strict=True):
        ready[number] = share(gradient * tf.cast(scale, gradient.dtype))
    return ready
