# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Arithmetic of `superbatch.normalize`, on traced numbers.

`superbatch.normalize` raises for a negative weight. Here a weight is only known when the program runs, so a
negative weight makes the total NaN instead, and with it every gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..errors import InputError
from ..normalize import check_accumulator_dtype

DTypeChoice = Literal["auto"] | None | Any


def sum_dtype(dtype: Any, choice: DTypeChoice = "auto") -> Any:
    """Return the dtype in which gradients of `dtype` are summed.

    Args:
        dtype: the dtype of the gradients.
        choice: ``"auto"``: float32, or `dtype` if it is wider; None: `dtype`; or a real dtype. Complex
            gradients are summed in the complex dtype of the same precision.

    Examples:
        >>> [sum_dtype(dtype).name for dtype in ("bfloat16", "float64", "complex64")]
        ['float32', 'float64', 'complex64']
    """
    own = jnp.dtype(dtype)
    if choice is None or not jnp.issubdtype(own, jnp.inexact):
        return own
    if isinstance(choice, str) and choice == "auto":
        return jnp.promote_types(own, jnp.float32)
    asked = jnp.dtype(choice)
    return jnp.promote_types(asked, jnp.complex64) if jnp.issubdtype(own, jnp.complexfloating) else asked


def check_sum_dtype(choice: DTypeChoice) -> DTypeChoice:
    """Return the choice if it is ``"auto"``, None or a real floating dtype; raise InputError otherwise.

    Examples:
        >>> check_sum_dtype("auto")
        'auto'
    """

    def is_floating(dtype: Any) -> bool:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))

    others = "None (the dtype of the gradients) or a dtype such as jnp.float32"
    return check_accumulator_dtype(choice, is_floating, others)


def as_weight(weight: Any, where: str) -> Any:
    """Return a weight as a scalar array of a dtype of 32 bits or more.

    Raises:
        InputError: it is no real scalar, or its dtype is too short to count: bfloat16 counts to 256,
            float16 to 2048.

    Examples:
        >>> as_weight(3, "weight").dtype.name
        'int32'
    """
    if isinstance(weight, Mapping):
        raise InputError(
            f"{where} is a mapping with the names {list(weight)}, not one number. For several losses, each "
            "with its own weight, pass weight={name: ...} to value_and_grad."
        )
    array = jnp.asarray(weight)
    if array.shape != () or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise InputError(
            f"The weight of a micro-batch is one real number, but {where} has shape {array.shape} and "
            f"dtype {array.dtype}. Return the number of samples or tokens as a scalar, such as mask.sum()."
        )
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32:
        raise InputError(
            f"The dtype {array.dtype} of {where} is too short to count: bfloat16 counts to 256, float16 to "
            "2048. Count in float32 or int32: mask.sum(dtype=jnp.float32)."
        )
    if jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 32:
        return array.astype(jnp.int32)
    return array


def pairwise_sum(values: Any) -> Any:
    """Sum a vector in pairs: a running sum of ones in float32 stops at 2**24.

    Examples:
        >>> print(pairwise_sum(jnp.arange(1.0, 6.0)))
        15.0
    """
    while values.shape[0] > 1:
        if values.shape[0] % 2:
            values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
        values = values[0::2] + values[1::2]
    return values[0]


def takes_part(weight: Any, reduction: str) -> Any:
    """Return whether a micro-batch contributes: a mean unless its weight is 0, a sum always.

    Examples:
        >>> print(takes_part(jnp.array([2, 0]), "mean"), takes_part(jnp.array([2, 0]), "sum"))
        [ True False] [ True  True]
    """
    return weight != 0 if reduction == "mean" else jnp.ones_like(weight, bool)


def taking_part(values: Any, kept: Any) -> Any:
    """Return the values, or 0 where not kept.

    A product would not do: the mean over no tokens is NaN, and 0 x NaN is NaN.

    Examples:
        >>> print(taking_part(jnp.array([1.0, jnp.nan]), jnp.array([True, False])))
        [1. 0.]
    """
    return jnp.where(kept, values, jnp.zeros((), jnp.result_type(values)))


def total_weight(weights: Any) -> Any:
    """Return ``W`` as JAX's default float or wider, or NaN if a weight is negative; ints are added as ints.

    Examples:
        >>> print(total_weight(jnp.array([4, 4, 2])), total_weight(jnp.array([4, -1])))
        10.0 nan
    """
    total = pairwise_sum(weights)
    total = total.astype(jnp.promote_types(total.dtype, jnp.result_type(float)))
    return jnp.where(jnp.any(weights < 0), jnp.nan, total)


def per_weight(total: Any, weight: Any) -> Any:
    """Return a window's sum divided by its weight ``W``; NaN where ``W`` is 0: there is no mean.

    Examples:
        >>> print(per_weight(jnp.float32(20), jnp.float32(10)))
        2.0
    """
    return total / jnp.where(weight == 0, jnp.nan, weight)


def weighted(gradient: Any, dtype: Any, factor: Any = None, keep: Any = None) -> Any:
    """Return an array of gradients in the dtype of the sums, times a factor; zeros if not kept.

    The cast comes first: a float16 gradient times 1000 tokens overflows.

    Examples:
        >>> print(weighted(jnp.float16(100), jnp.float32, jnp.int32(1000)))
        100000.0
        >>> print(weighted(jnp.float32(jnp.nan), jnp.float32, jnp.int32(0), jnp.array(False)))
        0.0
    """
    part = gradient.astype(dtype)
    if factor is not None:
        part = part * factor.astype(jnp.finfo(dtype).dtype)  # the real dtype: part may be complex
    return part if keep is None else taking_part(part, keep)


def loss_sum(losses: Any, weights: Any, keep: Any, *, reduction: str, dtype: Any) -> Any:
    """Return ``sum w_i l_i`` for a mean, ``sum l_i`` for a sum, over the micro-batches that are kept.

    Examples:
        >>> losses, weights = jnp.array([3.0, jnp.nan]), jnp.array([2, 0])
        >>> print(loss_sum(losses, weights, weights != 0, reduction="mean", dtype=jnp.float32))
        6.0
    """
    terms = losses.astype(dtype)
    if reduction == "mean":
        terms = terms * weights.astype(dtype)
    return pairwise_sum(taking_part(terms, keep))


def gradient_of(sums: Any, weight: Any, like: Any) -> Any:
    """Return summed gradients divided by ``W``, in the dtypes of `like`; zeros if ``W`` is 0.

    Examples:
        >>> print(gradient_of(jnp.float32(6), jnp.float32(0), jnp.bfloat16(1)))
        0
    """

    def one(total: Any, dtype: Any) -> Any:
        real = jnp.finfo(total.dtype).dtype
        empty = weight == 0
        mean = total / jnp.where(empty, jnp.ones((), real), weight.astype(real))
        return jnp.where(empty, jnp.zeros((), total.dtype), mean).astype(dtype)

    return jax.tree.map(lambda total, leaf: one(total, jnp.result_type(leaf)), sums, like)


def square_norm(tree: Any) -> Any:
    """Return the sum of ``|x|^2`` over every element of a tree, in float32 or wider.

    Examples:
        >>> print(square_norm({"w": jnp.array([3.0, 4.0])}))
        25.0
    """
    parts = []
    for leaf in jax.tree.leaves(tree):
        wide = leaf.astype(sum_dtype(leaf.dtype))
        parts.append(jnp.sum(jnp.square(jnp.real(wide))))
        if jnp.issubdtype(wide.dtype, jnp.complexfloating):
            parts.append(jnp.sum(jnp.square(jnp.imag(wide))))
    return sum(parts[1:], start=parts[0]) if parts else jnp.zeros(())


def all_finite(tree: Any) -> Any:
    """Return whether every element of a tree is finite.

    Examples:
        >>> print(all_finite([jnp.ones(2), jnp.array(jnp.inf)]))
        False
    """
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def add_compensated(total: Any, lost: Any, value: Any) -> tuple[Any, Any]:
    """Add a value to a counter by compensated summation; return the new total and its rounding error.

    The counter's value is ``total + lost``. A plain float32 counter of tokens stops at 2**24.

    Examples:
        >>> total, lost = jnp.float32(2**24), jnp.float32(0)
        >>> for _ in range(4):
        ...     total, lost = add_compensated(total, lost, jnp.float32(1))
        >>> int(total + lost) - 2**24
        4
    """
    new = total + value
    back = new - total
    return new, lost + ((total - (new - back)) + (value - back))
