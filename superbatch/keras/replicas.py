# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""`tf.distribute` inside a train step: sums over replicas, and clipping of what all of them made."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ..errors import InputError
from . import forward, refusals


def several() -> bool:
    """Return True if the step runs on several replicas."""
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def check(model: Any) -> None:
    """Refuse what is not known to be right on several replicas.

    Raises:
        InputError: BatchNormalization in training, or a loss that is one number.
    """
    if not several():
        return
    if refusals.batchnorms(model):
        raise InputError(
            "BatchNormalization trains on several replicas, and its moving statistics cannot be written "
            "inside the loop of a replica. Freeze it (layer.trainable = False) or use GroupNormalization."
        )
    if forward.owns_compute_loss(model):
        raise InputError(
            f"The model {model.name!r} has a compute_loss of its own on several replicas, and it is not "
            "known whether it divides by their number. Compile a loss instead."
        )


def summed(value: Any) -> Any:
    """Return the sum over replicas of a tensor, or of each in a list: one collective either way."""
    if not several():
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def share(value: Any) -> Any:
    """Return this replica's share of something that all replicas have."""
    if not several():
        return value
    return value / tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, value.dtype)


def ready(optimizer: Any, gradients: list[Any], weights: list[Any]) -> list[Any]:
    """Return the gradients for the optimizer on this replica; it sums them over replicas after clipping.

    Where it clips, the gradient is summed and clipped here, by the optimizer's own rule, and each replica
    gives its share: that is below every threshold, and its sum is the clipped gradient.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not several() or not (inner.clipnorm or inner.global_clipnorm or inner.clipvalue):
        return gradients
    scale = optimizer.scale_loss(tf.ones(()))
    places = [number for number, gradient in enumerate(gradients) if gradient is not None]
    total = summed([gradients[number] for number in places])
    unscaled = [gradient / tf.cast(scale, gradient.dtype) for gradient in total]
    clipped = inner._clip_gradients(unscaled)
    ready = list(gradients)
    for number, gradient in zip(places, clipped, strict=True):
        ready[number] = share(gradient * tf.cast(scale, gradient.dtype))
    return ready
