# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Terms of a loss and their divisors, found as Keras finds them.

A term is the value of one compiled loss, or of `add_loss`, for a micro-batch: a mean, and the weight of that
mean. The kind of a term says over what the mean is:

    "rows"      over the rows of the micro-batch; its weight is known before the forward
    "counted"   over what a mask or sample weights count; its weight is known after the forward
    "sum"       a sum, not a mean: terms of micro-batches add up
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
        name: of the loss, for errors.
        kind: over what `value` is a mean.
        value: the mean (the sum, for the kind "sum"), a scalar tensor.
        weight: the weight of the mean, a scalar tensor; 1 for the kind "sum".
        factor: of the term in the total: the `loss_weights` of `compile`.
        stated: whether `loss_weight=` gave the weight.
        numbers: what `value` was reduced from, and for how many rows; None for one number.
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
    looking: bool,
) -> Term:
    """Read the term of one compiled loss.

    Args:
        name: of the loss.
        loss: a `keras.losses.Loss`.
        y: the targets of this loss.
        y_pred: the predictions.
        sample_weight: the sample weights of this loss, or None.
        stated: the weight that `loss_weight=` gave, or None.
        rows: of the micro-batch, a scalar tensor.
        looking: True for the first call, in which the loss is also evaluated for another number of rows.

    Raises:
        CoupledSamplesError: the loss compares rows with one another.
        LossSpecError: Keras does not know what the loss is divided by, and nothing is stated; or the loss
            cannot be put together from micro-batches.
    """
    _check_builtin(name, loss, y_pred)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
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
    found = rowwise.numbers(name, values, y_pred_)
    if looking:
        rowwise.check_twice(name, loss, y_, y_pred_, found)
    term = _reduced(name, loss, values, masks, sample_weight, rows)
    return Term(name, term.kind, term.value, term.weight, numbers=found)


def _check_builtin(name: str, loss: Any, y_pred: Any) -> None:
    """Refuse losses of Keras that are made of all rows, whatever weight is declared."""
    function = getattr(loss, "fn", None)  # also of a loss that was compiled by its name
    if function is keras.losses.circle:
        raise CoupledSamplesError(
            f"The loss {name!r} (keras.losses.Circle) compares each row with all other rows of the batch, "
            "and a micro-batch has only some of them. Use a loss that is computed from each row alone, or "
            "train with whole batches."
        )
    if function not in (keras.losses.dice, keras.losses.tversky):
        return
    axis = getattr(loss, "axis", None)
    if axis is None or 0 in np.atleast_1d(axis):
        kind = "Dice" if function is keras.losses.dice else "Tversky"
        rest = tuple(range(1, len(keras.tree.flatten(y_pred)[0].shape)))
        raise LossSpecError(
            f"The loss {name!r} with axis={axis!r} is a ratio of sums over all rows of the batch, and no "
            f"weight makes it from micro-batches. Compile keras.losses.{kind}(axis={rest!r}): one ratio for "
            "each sample."
        )


def _check_rank(name: str, loss: Any, y_pred: Any) -> None:
    """Refuse predictions without an axis beside the rows, of which losses of Keras average over the rows.

    Raises:
        LossSpecError: they are such.
    """
    of_keras = getattr(getattr(loss, "fn", None), "__module__", "").startswith("keras.")
    if of_keras and {len(leaf.shape) for leaf in keras.tree.flatten(y_pred)} == {1}:
        raise LossSpecError(
            f"The loss {name!r} averages over the last axis of the predictions, and their shape (rows,) has "
            "no axis beside the rows, so it returns one number. Keep the last axis: end the model with "
            "Dense(1) and no squeeze, for predictions of shape (rows, 1)."
        )


def stated_term(name: str, value: Any, stated: Any, sample_weight: Any) -> Term:
    """The term of a loss that is one number already.

    Raises:
        LossSpecError: nothing is stated about its divisor; or sample weights or a mask multiply the finished
            mean, so that no weight makes the batch's from those of micro-batches.
    """
    if stated is None:
        raise LossSpecError(
            f"The loss {name!r} returns one number for a micro-batch, and Keras does not know what it was "
            "divided by. Return one number for each sample or token, or state the weight of a micro-batch: "
            "loss_weight=lambda x, y, sample_weight: keras.ops.shape(y)[0] for a mean over rows."
        )
    if sample_weight is not None:
        raise LossSpecError(
            f"The loss {name!r} returns one number, and Keras multiplies such a mean with its mask or sample "
            "weights, which gives products that do not add up. Return one number for each sample or token, "
            "which the weights can be applied to."
        )
    return Term(name, "counted", value, stated, stated=True)


def _reduced(name: str, loss: Any, values: Any, masks: list[Any], sample_weight: Any, rows: Any) -> Term:
    """Reduce losses of samples or tokens as `keras.losses.Loss` does, keeping the divisor."""
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
        # Keras multiplies with total / valid and divides by all: one mask may stand for several values.
        divisor, kind = valid * arithmetic.per_weight(_size(values, count_dtype), total), "counted"
    else:
        divisor, kind = _size(values, count_dtype), "rows"
    value = arithmetic.per_weight(summed, ops.cast(divisor, summed.dtype))
    return Term(name, kind, value, ops.cast(rows, count_dtype) if kind == "rows" else divisor)


def _size(array: Any, dtype: str) -> Any:
    """The number of elements, in a dtype that can count."""
    return ops.cast(ops.prod(ops.convert_to_tensor(ops.shape(array), dtype="int32")), dtype)
