"""Arithmetic of a window: the weights of micro-batches, and the one division by their sum.

A window has micro-batches ``i = 1..K`` on ranks ``r = 1..R``; ``w_ri`` is the weight of a micro-batch,
``W = sum w_ri`` over micro-batches and ranks, ``l_ri`` its loss, as ``loss_fn`` returns it::

    reduction="mean":   L = sum (w_ri / W) l_ri          scale of micro-batch ri:  w_ri / W
    reduction="sum":    L = sum  l_ri / W                scale:                    1 / W
    reduction="total":  L = sum  l_ri                    scale:                    1
    gradients averaged over R ranks afterwards:          scale x R

With a mean, a micro-batch of weight 0 contributes nothing, even if its loss is NaN. With a sum it
contributes: images without boxes have the weight 0, but they have a loss. ``W`` may have a lower bound:
``max(sum w_ri, min_weight)``.

Weights are ints or float64 on the host: a float32 counter stops counting at 2**24, a bfloat16 one at 256.
"""

from __future__ import annotations

# pyright: strict
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from .errors import InputError

Reduction = Literal["mean", "sum", "total"]
Number = int | float
LARGEST_TOTAL = 1e300  # largest sum of weights: a loss times it must not overflow float64


def check_reduction(reduction: object, known: Sequence[str] = get_args(Reduction)) -> Reduction:
    """Return the reduction if the backend has it.

    Args:
        reduction: the argument of the user.
        known: the reductions of the backend.

    Raises:
        InputError: `reduction` is not in `known`.

    Examples:
        >>> check_reduction("mean")
        'mean'
    """
    if isinstance(reduction, str) and reduction in known:
        return reduction  # pyright: ignore[reportReturnType]  (narrowed by `known`, which pyright cannot follow)
    means = {"mean": "the mean", "sum": "the sum", "total": "a sum that is never divided"}
    raise InputError(
        f"reduction={reduction!r} is not a reduction. Pass what loss_fn returns for a micro-batch: "
        + ", ".join(f'"{name}" ({means[name]})' for name in known)
        + "."
    )


def check_min_weight(min_weight: object, reduction: Reduction) -> Number:
    """Return the lower bound of a window's weight if it is valid.

    Raises:
        InputError: it is not a positive number, or the reduction is "total", which is not divided.

    Examples:
        >>> check_min_weight(1, "sum")
        1
    """
    if isinstance(min_weight, bool) or not isinstance(min_weight, int | float):
        raise InputError(f"at_least({min_weight!r}) is not a number. Pass a positive number, such as 1.")
    if not (math.isfinite(min_weight) and min_weight > 0):
        raise InputError(
            f"at_least({min_weight!r}) is not positive and finite. Pass a positive number, such as 1."
        )
    if reduction == "total":
        raise InputError('With reduction="total" no sum is divided, so at_least() has no effect. Remove it.')
    return min_weight


def check_accumulator_dtype(choice: Any, is_floating: Callable[[Any], bool], others: str) -> Any:
    """Return the choice of a dtype for sums if it is ``"auto"``, None or a real floating dtype.

    Args:
        choice: the argument `accumulator_dtype` of the user.
        is_floating: function that returns True for a real floating dtype of the framework. It raises
            TypeError if its argument is not a dtype.
        others: the choices besides ``"auto"``, for the error text.

    Raises:
        InputError: it is anything else.

    Examples:
        >>> check_accumulator_dtype("auto", callable, "None")
        'auto'
    """
    if choice is None or (isinstance(choice, str) and choice == "auto"):
        return choice
    try:
        if is_floating(choice):
            return choice
    except TypeError:
        pass
    raise InputError(
        f'accumulator_dtype={choice!r} is not a real floating dtype. Pass "auto" (float32 or wider), '
        f"{others}."
    )


def check_weight(weight: object, where: str) -> Number:
    """Return a weight as a Python number.

    Args:
        weight: an int or float, or an object with ``item()`` (a one-element tensor or array).
        where: the micro-batch of the weight, for the error text.

    Returns:
        An int for an integer weight, else a float.

    Raises:
        InputError: it is not a number, or it is negative, NaN or infinite.

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
            f"The weight {weight!r} of {where} is not one number. Return an int (samples, tokens) or a float "
            "(a sum of sample weights)."
        )
    if not math.isfinite(number) or number < 0:
        raise InputError(
            f"The weight {number!r} of {where} is negative or not finite. Return the number of samples or "
            "tokens, or a sum of non-negative sample weights."
        )
    return number


def total_weight(weights: Iterable[Number]) -> Number:
    """Return ``W``: exact for ints, correctly rounded for floats.

    Raises:
        InputError: the sum is above 1e300 or NaN.

    Examples:
        >>> total_weight([4, 4, 2])
        10
        >>> total_weight([0.1] * 10)
        1.0
    """
    weights = list(weights)
    total = sum(weights)
    if not abs(total) <= LARGEST_TOTAL:  # fsum would raise, and a loss times its weight would overflow
        raise InputError(
            f"The weights of the window add up to {float(min(total, 1e308)):.3g}; the largest sum is 1e300. "
            "Return a number of samples or tokens, or a sum of sample weights."
        )
    return total if isinstance(total, int) else math.fsum(weights)  # a sum of ints is exact already


def takes_part(weight: Number, *, reduction: Reduction) -> bool:
    """Return True if the micro-batch contributes to the gradient; a mean over zero tokens does not.

    Examples:
        >>> takes_part(0, reduction="mean"), takes_part(0, reduction="sum")
        (False, True)
    """
    return reduction != "mean" or weight != 0


def window_weight(counted: Number, *, reduction: Reduction, min_weight: Number | None = None) -> Number:
    """Return ``W``, the divisor of the sum over a window: ``max(counted, min_weight)``; 1 for a total.

    Args:
        counted: sum of the weights over micro-batches and ranks.
        reduction: the reduction of the loss that ``loss_fn`` returns.
        min_weight: lower bound of ``W``.

    Examples:
        >>> window_weight(0, reduction="sum", min_weight=1), window_weight(7, reduction="total")
        (1, 1)
    """
    if reduction == "total":
        return 1
    return counted if min_weight is None else max(counted, min_weight)


def scale(weight: Number, total: Number, *, reduction: Reduction, ranks: int = 1) -> float:
    """Return the factor of one micro-batch's loss: ``w / W`` for a mean, ``1 / W`` for a sum, 1 for a total.

    Args:
        weight: the micro-batch's weight ``w >= 0``; with a mean ``0`` gives ``0.0``.
        total: the weight ``W`` of the window over all ranks; ``0`` gives ``0.0``: no update is made then.
        reduction: the reduction of the loss that ``loss_fn`` returns.
        ranks: number of ranks if a backend averages gradients over them afterwards, else 1.

    Examples:
        >>> [scale(w, 10, reduction="mean") for w in (4, 4, 2)]
        [0.4, 0.4, 0.2]
        >>> scale(4, 10, reduction="sum", ranks=2), scale(0, 10, reduction="sum")
        (0.2, 0.1)
        >>> scale(0, 0, reduction="mean"), scale(3, 10, reduction="total")
        (0.0, 1.0)
    """
    if reduction == "total":
        return float(ranks)
    if total == 0 or (weight == 0 and not takes_part(weight, reduction=reduction)):
        return 0.0
    numerator = weight if reduction == "mean" else 1
    return ranks * numerator / total


def after_forward_scale(weight: Number, *, reduction: Reduction) -> Number:
    """Return the factor of a loss while ``W`` is unknown; at the end of the window `divisor` corrects it.

    Examples:
        >>> after_forward_scale(4, reduction="mean"), after_forward_scale(0, reduction="sum")
        (4, 1)
    """
    return weight if reduction == "mean" else 1


def divisor(planned: Number, counted: Number) -> float:
    """Return the divisor of the summed gradients at the end of a window: ``counted / planned``.

    ``planned`` is the total weight by which the losses were already divided (1 if ``W`` was unknown);
    ``counted`` is the weight of the micro-batches that contributed.

    Examples:
        >>> divisor(10, 10), divisor(10, 8), divisor(1, 8)
        (1.0, 0.8, 8.0)
    """
    return counted / planned


def loss_sum(losses: Iterable[float], weights: Iterable[Number], *, reduction: Reduction) -> float:
    """Return the sum over the samples of a window from the losses of its micro-batches.

    It is ``sum w_i l_i`` for a mean, without micro-batches of weight 0, as their loss may be NaN; else
    ``sum l_i``.

    Args:
        losses: the loss of each micro-batch, as ``loss_fn`` returned it.
        weights: the weight of each micro-batch.
        reduction: the reduction of the loss that ``loss_fn`` returns.

    Returns:
        The sum; infinite if it exceeds the largest float64 (1.8e308), like the sum of a NumPy array.

    Examples:
        >>> loss_sum([1.0, 1.0, 6.0], [4, 4, 2], reduction="mean")
        20.0
        >>> loss_sum([1e308, 1e308], [1, 1], reduction="sum")
        inf
    """
    terms = [
        loss * weight if reduction == "mean" else loss
        for loss, weight in zip(losses, weights, strict=True)
        if weight or takes_part(weight, reduction=reduction)
    ]
    # fsum is exact but raises on inf - inf; a non-finite loss must be reported as it is.
    if not all(map(math.isfinite, terms)):
        return sum(terms)
    try:
        return math.fsum(terms)
    except OverflowError:  # a partial sum overflowed; the sum may be finite, such as 1e308 + 1e308 - 1e308
        return math.fsum(math.ldexp(term, -64) for term in terms) * 2.0**64  # if not, infinity


def mean_loss(losses: Iterable[float], weights: Iterable[Number], *, reduction: Reduction) -> float:
    """Return the loss of the batch from the losses of its micro-batches.

    Returns:
        ``sum w_i l_i / W`` for a mean, ``sum l_i / W`` for a sum, ``sum l_i`` for a total; NaN where
        ``W`` is 0.

    Examples:
        >>> mean_loss([1.0, 1.0, 6.0], [4, 4, 2], reduction="mean")
        2.0
        >>> mean_loss([4.0, 6.0], [2, 3], reduction="sum")
        2.0
    """
    weights = list(weights)
    counted = window_weight(total_weight(weights), reduction=reduction)
    return per_weight(loss_sum(losses, weights, reduction=reduction), counted)


def per_weight(total: float, weight: Number) -> float:
    """Return a window's sum divided by its weight ``W``; NaN where ``W`` is 0.

    Examples:
        >>> per_weight(20.0, 10)
        2.0
    """
    return total / weight if weight else math.nan
