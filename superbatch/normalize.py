"""The arithmetic of a window; nothing else in the library divides.

A window has micro-batches ``i = 1..K`` on ranks ``r = 1..R``; ``w_ri`` is the weight of a micro-batch,
``W = sum w_ri`` over micro-batches and ranks, ``l_ri`` what ``loss_fn`` returns::

    reduction="mean":  L = sum (w_ri / W) l_ri          scale of micro-batch ri:  w_ri / W
    reduction="sum":   L = sum  l_ri / W                scale:                    1 / W
    gradients averaged over R ranks afterwards:         scale x R

Weights are ints or float64 on the host: a float32 counter stops counting at 2**24, a bfloat16 one at 256.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Iterable
from typing import Literal, get_args

from .errors import InputError, explain

Reduction = Literal["mean", "sum"]
Number = int | float


def check_reduction(reduction: str) -> Reduction:
    """Return the reduction if it is one.

    Raises:
        InputError: it is neither ``"mean"`` nor ``"sum"``.

    Examples:
        >>> check_reduction("mean")
        'mean'
    """
    if reduction in get_args(Reduction):
        return reduction  # pyright: ignore[reportReturnType]  (narrowed by get_args, which pyright cannot follow)
    raise InputError(
        explain(
            f"reduction={reduction!r}",
            "a loss over a micro-batch is either a mean or a sum over it",
            'pass reduction="mean" (PyTorch\'s default) or reduction="sum"',
        )
    )


def check_weight(weight: object, where: str) -> Number:
    """Return a weight as a Python number.

    Args:
        weight: an int or float, or an object with ``item()`` (a one-element tensor or array).
        where: the micro-batch it belongs to, for the error.

    Returns:
        An int where the weight was an integer, else a float.

    Raises:
        InputError: it is no number, negative, NaN or infinite.

    Examples:
        >>> check_weight(3, "micro-batch 0")
        3
    """
    item = getattr(weight, "item", None)
    try:
        number = item() if callable(item) else weight
    except (RuntimeError, ValueError, TypeError):  # a tensor or array of several elements
        number = weight
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InputError(
            explain(
                f"weight {weight!r} of {where}",
                "a weight is one number: how much the micro-batch counts in the mean of its batch",
                "return an int (samples, tokens) or a float (a sum of sample weights)",
            )
        )
    if not math.isfinite(number) or number < 0:
        raise InputError(
            explain(
                f"weight {number!r} of {where}",
                "a weight must be finite and not negative",
                "return the number of samples or tokens, or a sum of non-negative sample weights",
            )
        )
    return number


def total_weight(weights: Iterable[Number]) -> Number:
    """Return ``W``: exact for ints, correctly rounded for floats.

    Examples:
        >>> total_weight([4, 4, 2])
        10
        >>> total_weight([0.1] * 10)
        1.0
    """
    weights = list(weights)
    total = sum(weights)
    return total if isinstance(total, int) else math.fsum(weights)  # one float makes the sum a float


def scale(weight: Number, total: Number, *, reduction: Reduction, ranks: int = 1) -> float:
    """Return the factor of one micro-batch's loss: ``w / W`` for a mean, ``1 / W`` for a sum.

    Args:
        weight: the micro-batch's weight ``w >= 0``; ``0`` always gives ``0.0``.
        total: the weight ``W`` of the window over all ranks.
        reduction: what ``loss_fn`` returns.
        ranks: number of ranks if a backend averages gradients over them afterwards, else 1.

    Examples:
        >>> [scale(w, 10, reduction="mean") for w in (4, 4, 2)]
        [0.4, 0.4, 0.2]
        >>> scale(4, 10, reduction="sum", ranks=2)
        0.2
        >>> scale(0, 0, reduction="mean")
        0.0
    """
    if weight == 0:
        return 0.0
    numerator = weight if reduction == "mean" else 1
    return ranks * numerator / total


def after_forward_scale(weight: Number, *, reduction: Reduction) -> Number:
    """Return the factor of a loss where ``W`` is not known yet: sums first, `divisor` later.

    Examples:
        >>> after_forward_scale(4, reduction="mean"), after_forward_scale(4, reduction="sum")
        (4, 1)
    """
    if weight == 0:
        return 0
    return weight if reduction == "mean" else 1


def divisor(planned: Number, counted: Number) -> float:
    """Return what summed gradients are divided by at the boundary: ``counted / planned``.

    ``planned`` is the total that the micro-batches were already scaled with (1 where ``W`` was unknown),
    ``counted`` the weight of the micro-batches that did take part.

    Examples:
        >>> divisor(10, 10), divisor(10, 8), divisor(1, 8)
        (1.0, 0.8, 8.0)
    """
    return counted / planned


def loss_sum(losses: Iterable[float], weights: Iterable[Number], *, reduction: Reduction) -> float:
    """Return the sum over the samples of a window from the losses of its micro-batches.

    ``sum w_i l_i`` for a mean, ``sum l_i`` for a sum; a micro-batch of weight 0 contributes nothing, NaN or
    not.

    Args:
        losses: what ``loss_fn`` returned, one per micro-batch.
        weights: the weight of each micro-batch.
        reduction: what ``loss_fn`` returns.

    Examples:
        >>> loss_sum([1.0, 1.0, 6.0], [4, 4, 2], reduction="mean")
        20.0
    """
    terms = [
        loss * after_forward_scale(weight, reduction=reduction)
        for loss, weight in zip(losses, weights, strict=True)
        if weight
    ]
    # fsum is exact but raises on inf - inf, which is a loss to report, not a failure of ours.
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def mean_loss(losses: Iterable[float], weights: Iterable[Number], *, reduction: Reduction) -> float:
    """Return the loss of the batch from the losses of its micro-batches.

    Returns:
        ``sum w_i l_i / W`` for a mean, ``sum l_i / W`` for a sum; NaN where ``W`` is 0.

    Examples:
        >>> mean_loss([1.0, 1.0, 6.0], [4, 4, 2], reduction="mean")
        2.0
        >>> mean_loss([4.0, 6.0], [2, 3], reduction="sum")
        2.0
    """
    weights = list(weights)
    return per_weight(loss_sum(losses, weights, reduction=reduction), total_weight(weights))


def per_weight(total: float, weight: Number) -> float:
    """Return a window's sum divided by its weight ``W``; NaN where ``W`` is 0.

    Examples:
        >>> per_weight(20.0, 10)
        2.0
    """
    return total / weight if weight else math.nan
