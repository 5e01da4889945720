# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Arithmetic of `superbatch.normalize`, on the tensors of a train step.

`superbatch.normalize` raises for a negative weight. Here a weight is only known when the step runs, so a
negative weight makes the total NaN instead, and with it the update.
"""

from __future__ import annotations

from typing import Any

from keras import ops
from keras.src import backend


def wide(dtype: Any) -> str:
    """Return the dtype for sums and counts of numbers of `dtype`: float32, or float64 for float64.

    Examples:
        >>> wide("bfloat16"), wide("float64")
        ('float32', 'float64')
    """
    return "float64" if backend.standardize_dtype(dtype) == "float64" else "float32"


def checked(weight: Any) -> Any:
    """Return a weight, or NaN if it is negative.

    Examples:
        >>> float(checked(ops.convert_to_tensor(-1.0)))
        nan
    """
    return ops.where(weight < 0, ops.full_like(weight, float("nan")), weight)


def scale(weight: Any, total: Any) -> Any:
    """Return ``w / W``, the factor of a micro-batch's mean; 0 where ``W`` is 0.

    Examples:
        >>> float(scale(ops.convert_to_tensor(4.0), ops.convert_to_tensor(8.0)))
        0.5
    """
    return per_weight(weight, total)


def per_weight(total: Any, weight: Any) -> Any:
    """Return a sum divided by its weight; 0 where the weight is 0, as in Keras.

    Examples:
        >>> float(per_weight(ops.convert_to_tensor(6.0), ops.convert_to_tensor(0.0)))
        0.0
    """
    # Not `ops.divide_no_nan`: on the JAX and torch backends its result for float64 is float32.
    empty = weight == 0
    divided = total / ops.where(empty, ops.ones_like(weight), weight)
    return ops.where(empty, ops.zeros_like(divided), divided)


def taking_part(value: Any, weight: Any) -> Any:
    """Return a value, or 0 where the weight is 0.

    A product with the weight would not do: the loss of no tokens may be NaN, and 0 x NaN is NaN.

    Examples:
        >>> float(taking_part(ops.convert_to_tensor(float("nan")), ops.convert_to_tensor(0.0)))
        0.0
    """
    return ops.where(weight == 0, ops.zeros_like(value), value)
