# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Properties of an optimizer: its loss scale, and whether one call is one update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from ..errors import OptimizerError
from .options import Options


def check(optimizer: Any, options: Options) -> None:
    """Raise unless one call of an optimizer is one update.

    Raises:
        OptimizerError: it has no `apply_gradients`, accumulates gradients itself, or lowers its loss scale on
            overflows that ``nonfinite="skip_microbatch"`` would hide.
    """
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise OptimizerError(
            f"The optimizer of type {type(optimizer).__name__} has no apply_gradients. Pass an optimizer of "
            "Keras, or of tf.compat.v1.train."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps:
        raise OptimizerError(
            f"The optimizer has gradient_accumulation_steps={steps}, so it would make one update for {steps} "
            "windows. Make it without gradient_accumulation_steps."
        )
    if scales_by_itself(optimizer) and options.nonfinite == "skip_microbatch":
        raise OptimizerError(
            f'nonfinite="skip_microbatch" hides the overflows by which a {type(optimizer).__name__} lowers '
            'its scale. Make the accumulator with nonfinite="raise" or "skip_update".'
        )


def scales_by_itself(optimizer: Any) -> bool:
    """Return whether it is a `LossScaleOptimizer`: it lowers its loss scale when a gradient is not finite.

    Examples:
        >>> scales_by_itself(tf.keras.optimizers.SGD(0.1))
        False
    """
    return getattr(optimizer, "inner_optimizer", None) is not None


def check_scale(optimizer: Any, *, traced: bool) -> None:
    """Raise if a traced loss may have been scaled before the scale was a variable.

    `scale_loss` of an optimizer that is not built multiplies by a constant, the initial scale. A graph keeps
    this constant, but the update divides by the current scale.

    Raises:
        OptimizerError: ``add`` was traced before the optimizer was built. The window is kept.
    """
    if traced and scales_by_itself(optimizer) and not getattr(optimizer, "built", True):
        raise OptimizerError(
            f"The {type(optimizer).__name__} was not built before add() was traced, so the graph may contain "
            "its initial scale as a constant. Call optimizer.build(variables) before the first call of "
            "the function that adds."
        )


def scale_of(optimizer: Any) -> Any | None:
    """Return the factor of `optimizer.scale_loss`, by which the update divides; None without.

    Examples:
        >>> scale_of(tf.keras.optimizers.SGD(0.1, loss_scale_factor=128.0))
        128.0
    """
    dynamic = getattr(optimizer, "dynamic_scale", None)
    if dynamic is not None:
        return tf.cast(tf.convert_to_tensor(dynamic), tf.float64)
    return getattr(optimizer, "loss_scale_factor", None)


def build(optimizer: Any, variables: Sequence[Any], strategy: Any | None) -> None:
    """Build the optimizer for all variables of the accumulator.

    `apply_gradients` would build it under a condition, and only for the variables with a gradient.

    Raises:
        OptimizerError: the optimizer was created under another strategy, or under none. The window is kept.
    """
    if getattr(optimizer, "built", True) or not callable(getattr(optimizer, "build", None)):
        return
    try:
        # init_scope: variables are made outside of the graph that is being traced.
        with tf.init_scope(), strategy.scope() if strategy else nullcontext():
            optimizer.build(list(variables))
            optimizer.built = True
    except RuntimeError as error:
        if strategy is None:
            raise
        raise OptimizerError(
            f"The optimizer of type {type(optimizer).__name__} cannot be built within the strategy "
            f"({error}). Create it within strategy.scope(), like the model."
        ) from error
