# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Facts about an optimizer: its divisor, and whether it can be called once per window."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from ..errors import OptimizerError
from .options import Options


def check(optimizer: Any, options: Options) -> None:
    """Check that one call of an optimizer is one update.

    Raises:
        OptimizerError: it is no optimizer, accumulates by itself, or needs to see what would be left out.
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
            f"The optimizer has gradient_accumulation_steps={steps}, so it would accumulate a second "
            "time and update once in several windows. Make it without gradient_accumulation_steps."
        )
    if scales_by_itself(optimizer) and options.nonfinite == "skip_microbatch":
        raise OptimizerError(
            f'nonfinite="skip_microbatch" hides the overflows by which a {type(optimizer).__name__} lowers '
            'its scale. Make the accumulator with nonfinite="raise" or "skip_update".'
        )


def scales_by_itself(optimizer: Any) -> bool:
    """Return whether losses are scaled by a number that the optimizer lowers when it sees an infinity.

    Examples:
        >>> scales_by_itself(tf.keras.optimizers.SGD(0.1))
        False
    """
    return getattr(optimizer, "inner_optimizer", None) is not None


def check_scale(optimizer: Any, *, traced: bool) -> None:
    """Check that no graph has scaled a loss by a scale that was not yet a variable.

    Before it is built, `scale_loss` of an optimizer multiplies by a constant, its initial scale. A graph
    keeps this constant, and the update divides by the scale at that time.

    Raises:
        OptimizerError: a graph of ``add`` is older than the variables of the optimizer. The window stays.
    """
    if traced and scales_by_itself(optimizer) and not getattr(optimizer, "built", True):
        raise OptimizerError(
            f"The {type(optimizer).__name__} was not built before add() was traced, so the graph may have "
            "kept its initial scale as a constant. Call optimizer.build(variables) before the first call of "
            "the function that adds."
        )


def scale_of(optimizer: Any) -> Any | None:
    """Return the factor of `optimizer.scale_loss`, by which its update divides; None for none.

    Examples:
        >>> scale_of(tf.keras.optimizers.SGD(0.1, loss_scale_factor=128.0))
        128.0
    """
    dynamic = getattr(optimizer, "dynamic_scale", None)
    if dynamic is not None:
        return tf.cast(tf.convert_to_tensor(dynamic), tf.float64)
    return getattr(optimizer, "loss_scale_factor", None)


def build(optimizer: Any, variables: Sequence[Any], strategy: Any | None) -> None:
    """Make the optimizer's variables for all of the model's: not under a condition, and not for some.

    Raises:
        OptimizerError: the optimizer belongs to another strategy, or to none. The window stays.
    """
    if getattr(optimizer, "built", True) or not callable(getattr(optimizer, "build", None)):
        return
    try:
        with tf.init_scope(), strategy.scope() if strategy else nullcontext():
            optimizer.build(list(variables))
            optimizer.built = True
    except RuntimeError as error:
        if strategy is None:
            raise
        raise OptimizerError(
            f"The optimizer of type {type(optimizer).__name__} cannot be built within the strategy "
            f"({error}). Create it within strategy.scope(), as the model."
        ) from error
