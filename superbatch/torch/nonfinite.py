"""Which micro-batch, with which loss, made which parameter's gradient NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import explain
from .gradients import Owned, all_finite, clear


def first_bad_parameter(owned: list[Owned], gradients: Sequence[Tensor | None]) -> str | None:
    """Return the name of the first parameter whose gradient is not finite.

    Examples:
        >>> weight = torch.zeros(1)
        >>> first_bad_parameter([Owned("w", weight, weight, {})], [torch.tensor([math.nan])])
        'w'
    """
    for entry, gradient in zip(owned, gradients, strict=True):
        if gradient is not None and not all_finite([gradient]):
            return entry.name
    return None


def find_microbatch(count: int, backward: Callable[[int], None], owned: list[Owned]) -> int | None:
    """Return the first micro-batch whose own gradient is not finite, by running each of them once more.

    Args:
        count: number of micro-batches.
        backward: ``backward(i)`` computes the gradient of micro-batch ``i``, all of them in order.
        owned: the parameters to look at.
    """
    for index in range(count):
        clear(owned)
        backward(index)
        if not all_finite([entry.parameter.grad for entry in owned if entry.parameter.grad is not None]):
            return index
    return None


def text(index: int | None, count: int, loss: float | None, parameter: str | None) -> str:
    """Compose the error text.

    Args:
        index: the micro-batch, or None where it is on another rank or unknown.
        count: micro-batches of the window.
        loss: its loss.
        parameter: the first parameter with a gradient that is not finite, if any.

    Examples:
        >>> text(1, 4, math.nan, "fc.weight")[:60]
        'Given: micro-batch 1 of 0..3 with loss nan. Wrong: its loss '
    """
    if index is None:
        given = "a window with a micro-batch that is not finite (on another rank, or one that could not be told)"
    else:
        given = f"micro-batch {index} of 0..{count - 1}" + ("" if loss is None else f" with loss {loss:g}")
    what = "its loss" if loss is not None and not math.isfinite(loss) else "its gradient"
    where = f"; the first parameter with a gradient that is not finite is {parameter!r}" if parameter else ""
    return explain(
        given,
        f"{what} is not finite{where}; nothing was updated, everything is as before the window",
        'look at that micro-batch; nonfinite="skip_microbatch" leaves it (and its weight) out, '
        'nonfinite="skip_update" gives up the whole update',
    )
