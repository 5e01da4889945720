# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Terms of a loss and their divisors, computed by Keras' rules.

A term is one compiled loss, or the sum of `add_loss`, for one micro-batch: a mean, and the weight of this
mean. There are three kinds of terms:

    "rows"      mean over the rows of the micro-batch; its weight is known before the forward
    "counted"   mean over entries that a mask or sample weights count; its weight is known after the forward
    "sum"       a sum, not a mean; the terms of micro-batches are added
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src import backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank

from ..errors import CoupledSamplesError, LossSpecError
from . import arithmetic, rowwise

Kind = Literal["rows", "counted", "sum"]


class Term(NamedTuple):
    """Result of one loss for one micro-batch.

    Attributes:
        name: the name of the loss, for error texts.
        kind: the kind of mean, see the module.
        value: the mean (the sum, for the kind "sum"), a scalar tensor.
        weight: the weight of the mean, a scalar tensor; 1 for the kind "sum".
        factor: the factor of the term in the total, from `loss_weights` of `compile`.
        stated: whether the weight comes from `loss_weight=`.
        numbers: the shape that `value` was reduced from, and the rows; None if the loss returned one number.
    """

    name: str
    kind: Kind
    value: Any
    weight: Any
    factor: Any = 1.0
    stated: bool = False
    numbers: rowwise.Numbers | None = None

    def times(self, factor: Any) -> Term:
        """Return the same term with another factor."""
        return Term(self.name, self.kind, self.value, self.weight, factor, self.stated, self.numbers)


def term_of(
    name: str,
    loss: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    stated: Any,
    rows: Any,
    *,
    inspecting: bool,
) -> Term:
    """Return the term of one compiled loss.

    Args:
        name: the name of the loss.
        loss: a `keras.losses.Loss`.
        y: the targets of this loss.
        y_pred: the predictions.
        sample_weight: the sample weights of this loss, or None.
        stated: the weight by `loss_weight=`, or None.
        rows: the rows of the micro-batch, a scalar tensor.
        inspecting: whether to also trace the loss for another number of rows; True while the plan is made.

    Raises:
        CoupledSamplesError: the loss compares rows with one another.
        LossSpecError: Keras does not know the divisor of the loss and `stated` is None; or the loss of a
            batch is no weighted mean of those of micro-batches.
    """
    _check_builtin(name, loss, y_pred)
    if type(loss).__call__ is not keras.losses.Loss.__call__:  # it may reduce by a rule of its own
        return stated_term(name, loss(y, y_pred, sample_weight), stated, sample_weight)
    if loss.reduction in (None, "none"):
        raise LossSpecError(
            f"The loss {name!r} with reduction={loss.reduction!r} is one number for each sample, and an "
            'update needs one number. Give the loss reduction="sum_over_batch_size", '
            '"mean_with_sample_weight" or "sum".'
        )
    y_pred_, y_ = (
        keras.tree.map_structure(lambda leaf: ops.convert_to_tensor(leaf, dtype=loss.dtype), part)
        for part in (y_pred, y)
    )
    mask = backend.get_keras_mask(y_pred)
    values = loss.call(y_, y_pred_)
    masks = [part for part in (mask, backend.get_keras_mask(values)) if part is not None]
    values = ops.convert_to_tensor(values, dtype=loss.dtype)
    if len(values.shape) == 0:
        if stated is None:
            _check_rank(name, loss, y_pred_)
        return stated_term(name, values, stated, sample_weight if not masks else masks[0])
    numbers = rowwise.numbers(name, values, y_pred_)
    if inspecting:
        rowwise.check_twice(name, loss, y_, y_pred_, numbers)
    term = _reduced(name, loss, values, masks, sample_weight, rows)
    return Term(name, term.kind, term.value, term.weight, numbers=numbers)


def _check_builtin(name: str, loss: Any, y_pred: Any) -> None:
    """Raise for losses of Keras that couple all rows, with any weight.

    Raises:
        CoupledSamplesError: the loss is `Circle`.
        LossSpecError: the loss is `Dice` or `Tversky` over all rows.
    """
    function = getattr(loss, "fn", None)  # a loss compiled by name is a wrapper with the function as `fn`
    if function is keras.losses.circle:
        raise CoupledSamplesError(
            f"The loss {name!r} (keras.losses.Circle) compares each row with all other rows of the batch, "
            "but a micro-batch has only some of them. Use a loss that is computed from each row alone, or "
            "train with whole batches."
        )
    if function not in (keras.losses.dice, keras.losses.tversky):
        return
    axis = getattr(loss, "axis", None)
    if axis is None or 0 in np.atleast_1d(axis):
        kind = "Dice" if function is keras.losses.dice else "Tversky"
        rest = tuple(range(1, len(keras.tree.flatten(y_pred)[0].shape)))
        raise LossSpecError(
            f"The loss {name!r} with axis={axis!r} is a ratio of sums over all rows of the batch, not a "
            f"weighted mean over micro-batches. Compile keras.losses.{kind}(axis={rest!r}): one ratio for "
            "each sample."
        )


def _check_rank(name: str, loss: Any, y_pred: Any) -> None:
    """Raise for predictions of shape (rows,): losses of Keras average over the last axis, here the rows.

    Raises:
        LossSpecError: the predictions have no axis beside the rows, and the loss is one of Keras.
    """
    of_keras = getattr(getattr(loss, "fn", None), "__module__", "").startswith("keras.")
    if of_keras and {len(leaf.shape) for leaf in keras.tree.flatten(y_pred)} == {1}:
        raise LossSpecError(
            f"The loss {name!r} averages over the last axis of the predictions, and their shape (rows,) has "
            "no axis beside the rows, so it returns one number. Keep the last axis: end the model with "
            "Dense(1) and no squeeze, for predictions of shape (rows, 1)."
        )


def stated_term(name: str, value: Any, stated: Any, sample_weight: Any) -> Term:
    """Return the term of a loss that returned one number.

    Raises:
        LossSpecError: its divisor is not stated; or Keras multiplies the mean by sample weights or a mask,
            and the sum of such products is no mean over the batch.
    """
    if stated is None:
        raise LossSpecError(
            f"The loss {name!r} returns one number for a micro-batch, and Keras does not know its divisor. "
            "Return one number for each sample or token, or pass the divisor: "
            "loss_weight=lambda x, y, sample_weight: keras.ops.shape(y)[0] for a mean over rows."
        )
    if sample_weight is not None:
        raise LossSpecError(
            f"The loss {name!r} returns one number, and Keras multiplies it by each sample weight or mask "
            "entry, so the loss of the batch is not a mean of the losses of micro-batches. Return one number "
            "for each sample or token."
        )
    return Term(name, "counted", value, stated, stated=True)


def _reduced(name: str, loss: Any, values: Any, masks: list[Any], sample_weight: Any, rows: Any) -> Term:
    """Reduce the losses of samples or tokens as `keras.losses.Loss` does, to a mean and its divisor."""
    weights, total = None, None
    count_dtype = arithmetic.wide(values.dtype)
    if masks:
        mask = masks[0] if len(masks) == 1 else ops.logical_and(masks[0], masks[1])
        weights, total = ops.cast(mask, values.dtype), _size(mask, count_dtype)
        valid = ops.sum(ops.cast(mask, count_dtype))
    else:
        valid = None
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=values.dtype)
        if weights is None:
            weights = sample_weight
        else:
            weights, sample_weight = squeeze_or_expand_to_same_rank(weights, sample_weight)
            weights = sample_weight * weights
    if weights is not None:
        values, weights = squeeze_or_expand_to_same_rank(values, weights)
        values = values * weights
    summed = ops.sum(values)
    if loss.reduction == "sum":
        return Term(name, "sum", summed, ops.ones((), count_dtype))
    if loss.reduction == "mean_with_sample_weight" and weights is not None:
        divisor, kind = ops.sum(ops.cast(weights, count_dtype)), "counted"
    elif valid is not None and loss.reduction != "mean_with_sample_weight":
        # Keras multiplies by (mask entries / true entries) and divides by the number of values. One entry of
        # the mask may apply to several values.
        divisor, kind = valid * arithmetic.per_weight(_size(values, count_dtype), total), "counted"
    else:
        divisor, kind = _size(values, count_dtype), "rows"
    value = arithmetic.per_weight(summed, ops.cast(divisor, summed.dtype))
    return Term(name, kind, value, ops.cast(rows, count_dtype) if kind == "rows" else divisor)


def _size(array: Any, dtype: str) -> Any:
    """Return the number of elements of an array, in float32 or wider."""
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(array), dtype="int32")), dtype)
