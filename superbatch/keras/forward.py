# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Forward of one micro-batch: the predictions and the terms of the loss."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from ..errors import InputError, LossSpecError
from . import arithmetic
from .options import LossWeight, Options
from .taking import take
from .terms import Term, stated_term
from .window import Plan


def owns_compute_loss(model: Any) -> bool:
    """Return True if the model or its class overrides `compute_loss`."""
    return "compute_loss" in vars(model) or type(model).compute_loss is not keras.Model.compute_loss


def predictions(model: Any, x: Any) -> Any:
    """Return the model's output in training, called as by Keras' own train step."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def terms_of(model: Any, microbatch: Any, y_pred: Any, options: Options, plan: Plan | None) -> list[Term]:
    """Return the terms of the loss of a micro-batch, after its forward.

    Args:
        model: the model.
        microbatch: ``(x, y, sample_weight)``.
        y_pred: the model's predictions for `x`.
        options: the arguments of `accumulate`.
        plan: the plan for batches of this form; None when the terms serve to make it.

    Raises:
        LossSpecError: the divisor of a loss is not known, or `loss_weight` is given and no loss needs it.
    """
    x, y, sample_weight = microbatch
    rows = ops.convert_to_tensor(
        ops.shape(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))[0]
    )
    stated = None
    if options.loss_weight is not None:
        stated = as_weight(options.loss_weight, microbatch)
    if owns_compute_loss(model):
        value = model._compute_loss(x, y, y_pred, sample_weight, training=True)
        return [stated_term("compute_loss", ops.convert_to_tensor(value), stated, None)]
    terms = []
    if model._compile_loss is not None:
        terms = take(model._compile_loss, y, y_pred, sample_weight, stated, rows, plan)
    if stated is not None and not any(term.stated for term in terms):
        raise LossSpecError(
            "loss_weight is given, but Keras knows the divisors of these losses: "
            f"{', '.join(term.name for term in terms)}. "
            "Leave loss_weight out; sample_weight with the reduction 'mean_with_sample_weight' gives a "
            "weighted mean."
        )
    added = data_losses(model)
    if added:
        total = _sum(added)
        count = ops.cast(rows, arithmetic.wide(total.dtype))
        terms.append(Term("add_loss", "rows", total, count))
    if not terms:
        raise LossSpecError(
            "The model has no loss, so there is nothing to minimise. Pass loss= to compile()."
        )
    return terms


def data_losses(model: Any) -> list[Any]:
    """Return the losses from `add_loss` and activity regularizers, without the regularizers of weights."""
    losses = model.losses
    return losses[: len(losses) - len(model._get_regularization_losses())]


def weight_regularization(model: Any) -> Any:
    """Return the sum of the regularizers of weights, which do not depend on data; None if there are none."""
    if owns_compute_loss(model):
        return None  # the model's compute_loss includes it
    losses = model._get_regularization_losses()
    if not losses:
        return None
    return _sum(losses)


def _sum(losses: list[Any]) -> Any:
    """Return the sum of losses as scalars of a floating dtype.

    Keras divides these losses by the number of replicas. Here the sum is not divided: `window` divides by the
    rows of the batch on all replicas.
    """
    numbers = [
        ops.sum(loss if keras.backend.is_float_dtype(loss.dtype) else ops.cast(loss, keras.config.floatx()))
        for loss in losses
    ]
    return sum(numbers[1:], start=numbers[0])


def as_weight(loss_weight: LossWeight, microbatch: Any) -> Any:
    """Return the weight of a micro-batch by `loss_weight`, as a scalar of float32 or wider.

    Raises:
        InputError: `loss_weight` returns no scalar.
    """
    weight = ops.convert_to_tensor(loss_weight(*microbatch))
    if len(weight.shape) != 0:
        raise InputError(
            f"loss_weight returns an array of shape {tuple(weight.shape)}, but the weight of a micro-batch "
            "is one number. Return a scalar, such as keras.ops.sum(mask)."
        )
    return arithmetic.checked(ops.cast(weight, arithmetic.wide(keras.config.floatx())))
