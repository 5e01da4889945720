# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Arithmetic of `superbatch.normalize`, on tensors whose values may be known only when a graph runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from .. import normalize
from ..errors import InputError

DTypeChoice = Literal["auto"] | None | Any
TOO_SHORT_TO_COUNT = (tf.bfloat16, tf.float16)


def sum_dtype(dtype: Any, choice: DTypeChoice = "auto") -> Any:
    """Return the dtype in which gradients of a variable of `dtype` are summed.

    Args:
        dtype: the dtype of the variable.
        choice: ``"auto"``: float32, or `dtype` if it is wider; None: `dtype`; or a real dtype. Complex
            gradients are summed in the complex dtype of the same precision.

    Examples:
        >>> [sum_dtype(dtype).name for dtype in (tf.bfloat16, tf.float64, tf.complex64)]
        ['float32', 'float64', 'complex64']
    """
    own = tf.as_dtype(dtype)
    if choice is None:
        return own
    if isinstance(choice, str) and choice == "auto":
        return own if own.is_complex or own.size >= 4 else tf.float32
    asked = tf.as_dtype(choice)
    if own.is_complex:
        return tf.complex128 if asked == tf.float64 else tf.complex64
    return asked


def check_sum_dtype(choice: DTypeChoice) -> DTypeChoice:
    """Return the choice if it is ``"auto"``, None or a real floating dtype; raise InputError otherwise.

    Examples:
        >>> check_sum_dtype("auto")
        'auto'
    """

    def is_floating(dtype: Any) -> bool:
        return bool(tf.as_dtype(dtype).is_floating)

    others = "None (the dtype of the variables) or a dtype such as tf.float32"
    return normalize.check_accumulator_dtype(choice, is_floating, others)


def as_count(value: Any, name: str) -> Any:
    """Return a weight or a number of samples: a Python number if its value is known, else a float64 scalar.

    Raises:
        InputError: it is not a number, is negative or not finite, or its dtype is too short to count
            (bfloat16 counts to 256, float16 to 2048). A value that is known only when a graph runs is checked
            there, by `countable`.

    Examples:
        >>> as_count(tf.constant(3), "weight"), as_count(2.5, "weight")
        (3, 2.5)
    """
    if not tf.is_tensor(value):
        return normalize.check_weight(value, f"a micro-batch ({name}=)")
    value = tf.convert_to_tensor(value)  # a variable is a tensor, too
    if value.dtype in TOO_SHORT_TO_COUNT or value.dtype.is_complex or value.dtype == tf.bool:
        raise InputError(
            f"{name} has the dtype {value.dtype.name}, which cannot hold a count: it is not real, or counts "
            "only up to 256 (bfloat16) or 2048 (float16). Count in int32, int64, float32 or float64: "
            "tf.reduce_sum(tf.cast(mask, tf.float32))."
        )
    if not value.shape.is_compatible_with(()):
        raise InputError(
            f"{name} has the shape {value.shape}, but must be one number for each micro-batch. Pass the "
            "number of samples or tokens as a scalar, such as tf.reduce_sum(mask)."
        )
    if is_known(value):
        return normalize.check_weight(value.numpy(), f"a micro-batch ({name}=)")
    return tf.cast(value, tf.float64)


def in_dtype(number: Any, dtype: Any) -> Any:
    """Return a Python number or a tensor as a tensor of a given dtype.

    Examples:
        >>> float(in_dtype(0.1, tf.float64)), float(tf.cast(0.1, tf.float64))
        (0.1, 0.10000000149011612)
    """
    # `tf.cast` would round a Python number to float32 first.
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def is_known(value: Any) -> bool:
    """Return whether the value of a tensor can be read now: in eager code, not in a graph.

    Examples:
        >>> is_known(tf.constant(1))
        True
    """
    return isinstance(value, tf.__internal__.EagerTensor)


def countable(value: Any) -> Any:
    """Return a boolean tensor: whether a count is finite and not negative.

    Examples:
        >>> bool(countable(tf.constant(-1.0)))
        False
    """
    return tf.math.is_finite(value) & (value >= 0)


def per_weight(totals: Sequence[Any], weight: Any) -> list[Any]:
    """Return the sums of a window divided by its weight ``W``, in their dtypes; undivided if ``W`` is 0.

    Examples:
        >>> [float(mean) for mean in per_weight([tf.constant(20.0)], tf.constant(10.0, tf.float64))]
        [2.0]
    """
    some: Any = tf.where(weight == 0, tf.ones_like(weight), weight)
    return [total / tf.cast(normalize.divisor(1, some), total.dtype) for total in totals]


def square_sum(value: Any) -> Any:
    """Return ``sum |x|^2`` of a tensor in float64, added in float32 or wider.

    Examples:
        >>> float(square_sum(tf.constant([3.0, 4.0])))
        25.0
    """
    if value.dtype.is_complex:
        return square_sum(tf.math.real(value)) + square_sum(tf.math.imag(value))
    wide = tf.cast(value, sum_dtype(value.dtype))
    return tf.cast(2 * tf.nn.l2_loss(wide), tf.float64)  # l2_loss makes no tensor of squares


def finite_norm(values: Sequence[Any]) -> tuple[Any, Any]:
    """Return the 2-norm over all values, and whether every element is finite, mostly in one pass.

    Examples:
        >>> norm, finite = finite_norm([tf.constant([3e30]), tf.constant([4e30])])
        >>> print(f"{float(norm):.0e}", bool(finite))
        5e+30 True
    """
    norm = tf.sqrt(tf.add_n([square_sum(value) for value in values]))

    def again() -> tuple[Any, Any]:
        # The norm is also infinite if the elements are finite, but their squares overflow float32.
        wide = [tf.cast(v, tf.complex128 if v.dtype.is_complex else tf.float64) for v in values]
        return tf.sqrt(tf.add_n([square_sum(value) for value in wide])), all_finite(values)

    return tf.cond(tf.math.is_finite(norm), lambda: (norm, tf.constant(value=True)), again)


def all_finite(values: Sequence[Any]) -> Any:
    """Return whether every element of every tensor is finite.

    Examples:
        >>> bool(all_finite([tf.ones(2), tf.constant([1.0, float("inf")])]))
        False
    """
    return tf.reduce_all([_finite(value) for value in values])


def _finite(value: Any) -> Any:
    if value.dtype.is_complex:
        return _finite(tf.math.real(value)) & _finite(tf.math.imag(value))
    return tf.reduce_all(tf.math.is_finite(value))
