# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""One micro-batch through the model: its predictions and the terms of its loss."""

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
    """Return True if the model, or its class, has a `compute_loss` of its own."""
    return "compute_loss" in vars(model) or type(model).compute_loss is not keras.Model.compute_loss


def predictions(model: Any, x: Any) -> Any:
    """The model's output in training, as Keras' own train step asks for it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def terms_of(model: Any, microbatch: Any, y_pred: Any, options: Options, plan: Plan | None) -> list[Term]:
    """Return the terms of the loss of a micro-batch that has just gone through the model.

    Args:
        model: the model.
        microbatch: its ``(x, y, sample_weight)``.
        y_pred: what the model made of `x`.
        options: of `accumulate`.
        plan: of such batches; None when the terms are inspected to make it.

    Raises:
        LossSpecError: a loss says too little, or `loss_weight` was given and no loss needs it.
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
            "loss_weight is given, and Keras knows what these losses are divided by: "
            f"{', '.join(term.name for term in terms)}. "
            "Leave loss_weight out; sample_weight with the reduction 'mean_with_sample_weight' gives a mean "
            "over weights."
        )
    own = data_losses(model)
    if own:
        total = _sum(own)
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
    """The sum of the regularizers of weights, which see no micro-batch; None where there is none."""
    if owns_compute_loss(model):
        return None  # it is in what the model's compute_loss returns
    losses = model._get_regularization_losses()
    if not losses:
        return None
    return _sum(losses)


def _sum(losses: list[Any]) -> Any:
    """The sum of losses; without the share of one replica that Keras takes, as the batch is that of all."""
    numbers = [
        ops.sum(loss if keras.backend.is_float_dtype(loss.dtype) else ops.cast(loss, keras.config.floatx()))
        for loss in losses
    ]
    return sum(numbers[1:], start=numbers[0])


def as_weight(loss_weight: LossWeight, microbatch: Any) -> Any:
    """Return the stated weight of a micro-batch as a scalar that can count.

    Raises:
        InputError: it is no scalar.
    """
    weight = ops.convert_to_tensor(loss_weight(*microbatch))
    if len(weight.shape) != 0:
        raise InputError(
            f"loss_weight returns an array of shape {tuple(weight.shape)}, and the weight of a micro-batch "
            "is one number. Return a scalar, such as keras.ops.sum(mask)."
        )
    return arithmetic.checked(ops.cast(weight, arithmetic.wide(keras.config.floatx())))
