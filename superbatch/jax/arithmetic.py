# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Arithmetic of `superbatch.normalize`, on traced numbers; nothing else in this package divides.

There a weight is a number on the host and may be refused. Here it is only known when the program runs, so a
weight that is negative makes the total NaN instead, and the NaN is in every gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..errors import InputError

DTypeChoice = Literal["auto"] | None | Any


def sum_dtype(dtype: Any, choice: DTypeChoice = "auto") -> Any:
    """Return the dtype in which gradients of `dtype` are summed.

    Args:
        dtype: of the gradients.
        choice: ``"auto"``: float32, or their own where that is wider; None: their own; or a real dtype.
            Complex gradients are summed in the complex dtype of that precision.

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
    """Return the choice if it is ``"auto"``, None or a real floating dtype; raises InputError otherwise.

    Examples:
        >>> check_sum_dtype("auto")
        'auto'
    """
    if choice is None or (isinstance(choice, str) and choice == "auto"):
        return choice
    try:
        if jnp.issubdtype(jnp.dtype(choice), jnp.floating):
            return choice
    except TypeError:
        pass
    raise InputError(
        f'accumulator_dtype={choice!r} is no floating-point type. Pass "auto" (float32 or wider), None (that '
        "of the gradients) or a dtype such as jnp.float32."
    )


def as_weight(weight: Any, where: str) -> Any:
    """Return a weight as a scalar array of a dtype that can count.

    Raises:
        InputError: it is no scalar, or of a dtype that stops counting: bfloat16 at 256, float16 at 2048.

    Examples:
        >>> as_weight(3, "weight").dtype.name
        'int32'
    """
    if isinstance(weight, Mapping):
        raise InputError(
            f"One number is needed, and {where} is a mapping with the names {list(weight)}. For several "
            "losses, each with its own weight, pass weight={name: ...} to value_and_grad."
        )
    array = jnp.asarray(weight)
    if array.shape != () or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise InputError(
            f"The weight of a micro-batch is one real number, and {where} has the shape {array.shape} and "
            f"dtype {array.dtype}. Return the number of samples or tokens as a scalar, such as mask.sum()."
        )
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int32)
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32:
        raise InputError(
            f"The dtype {array.dtype} of {where} is too short for a count: bfloat16 ends at 256, float16 at "
            "2048. Count in float32 or int32: mask.sum(dtype=jnp.float32)."
        )
    if jnp.issubdtype(array.dtype, jnp.integer) and jnp.iinfo(array.dtype).bits < 32:
        return array.astype(jnp.int32)
    return array


def pairwise_sum(values: Any) -> Any:
    """Return the sum of a vector, added in pairs: one after the other, a float32 stops counting at 2**24.

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
    """Return whether a micro-batch contributes: with a mean unless its weight is 0, with a sum always.

    Examples:
        >>> print(takes_part(jnp.array([2, 0]), "mean"), takes_part(jnp.array([2, 0]), "sum"))
        [ True False] [ True  True]
    """
    return weight != 0 if reduction == "mean" else jnp.ones_like(weight, bool)


def taking_part(values: Any, kept: Any) -> Any:
    """Return the values, but 0 where they are not kept: a mean over no token is NaN, and 0 x NaN is no 0.

    Examples:
        >>> print(taking_part(jnp.array([1.0, jnp.nan]), jnp.array([True, False])))
        [1. 0.]
    """
    return jnp.where(kept, values, jnp.zeros((), jnp.result_type(values)))


def total_weight(weights: Any) -> Any:
    """Return ``W`` in JAX's default float or wider (ints are added as ints); NaN where a weight is negative.

    Examples:
        >>> print(total_weight(jnp.array([4, 4, 2])), total_weight(jnp.array([4, -1])))
        10.0 nan
    """
    total = pairwise_sum(weights)
    total = total.astype(jnp.promote_types(total.dtype, jnp.result_type(float)))
    return jnp.where(jnp.any(weights < 0), jnp.nan, total)


def per_weight(total: Any, weight: Any) -> Any:
    """Return a window's sum divided by its weight ``W``; NaN where ``W`` is 0, as there is no mean.

    Examples:
        >>> print(per_weight(jnp.float32(20), jnp.float32(10)))
        2.0
    """
    return total / jnp.where(weight == 0, jnp.nan, weight)


def gradient_of(sums: Any, weight: Any, like: Any) -> Any:
    """Return summed gradients divided by ``W``, in the dtypes of `like`; zeros where ``W`` is 0.

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
    """Add to a counter that keeps what rounding takes from it, and return both.

    Without it a float32 counter of tokens stops at 2**24. The counter's value is ``total + lost``.

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
