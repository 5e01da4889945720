"""Micro-batch, loss and parameter behind a gradient that is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .participants.gradient_sum import ManagedParameter, all_finite, clear


@dataclass(frozen=True)
class Culprit:
    """Origin of values that are not finite.

    Attributes:
        index: the micro-batch, or None where it is on another rank or cannot be told.
        loss: its loss.
        parameter: the first parameter with a gradient that is not finite.
        whole: the loss was computed on the whole batch at once, which is then the only micro-batch.
        term: the name of the loss among several.
        droppable: a micro-batch can be left out with its weight; otherwise this is not advised.
        any_rank: it is this rank's micro-batch, or the one that another rank ran at the same time.
    """

    index: int | None = None
    loss: float | None = None
    parameter: str | None = None
    whole: bool = False
    term: str = ""
    droppable: bool = True
    any_rank: bool = False

    def text(self, count: int, *, skipping: bool = False) -> str:
        """Compose the error text.

        Args:
            count: micro-batches of the window.
            skipping: whole updates are given up already, so that this is not advised.

        Examples:
            >>> Culprit(1, math.nan, "fc.weight").text(4)[:38]
            'In micro-batch 1 of 0..3 with loss nan'
        """
        # Several texts, because the advice differs: a whole batch has no index.
        if self.whole:
            given = f"a batch with loss {self.loss:g}"
        elif self.index is None:
            given = "a micro-batch of this window (on another rank, or an unknown one)"
        else:
            of = f" of the term {self.term!r}" if self.term else ""
            rank = " (on this rank; or that of another rank)" if self.any_rank else ""
            given = f"micro-batch {self.index} of 0..{count - 1} with loss {self.loss:g}{of}{rank}"
        # A finite loss with an infinite gradient, e.g. sqrt at 0.
        what = "the loss" if self.loss is not None and not math.isfinite(self.loss) else "the gradient"
        where = f" (the first parameter with such a gradient is {self.parameter!r})" if self.parameter else ""
        drop = ['nonfinite="skip_microbatch" leaves it (and its weight) out']
        # Dropping is only advised where the options allow it.
        others = drop if self.droppable and not self.whole else []
        others += [] if skipping else ['nonfinite="skip_update" gives up the whole update']
        check = f"Check that {'batch' if self.whole else 'micro-batch'}"
        advice = "; ".join(filter(None, [check, ", ".join(others)]))
        return (
            f"In {given}, {what} is not finite{where}; nothing was updated, everything is as before the "
            f"window. {advice}."
        )


def first_bad_parameter(owned: list[ManagedParameter], gradients: Sequence[Tensor | None]) -> str | None:
    """Return the name of the first parameter whose gradient is not finite.

    Examples:
        >>> import torch
        >>> weight = torch.zeros(1)
        >>> owned = [ManagedParameter("w", weight, weight, torch.optim.SGD([weight]), 0)]
        >>> first_bad_parameter(owned, [torch.tensor([math.nan])])
        'w'
    """
    for entry, gradient in zip(owned, gradients, strict=True):
        # One parameter at a time: a joint norm would not tell which.
        if gradient is not None and not all_finite([gradient]):
            return entry.name
    return None


def first_bad_microbatch(
    indices: Iterable[int], backward: Callable[[int], None], owned: list[ManagedParameter]
) -> int | None:
    """Return the first micro-batch whose own gradient is not finite, by running each of them once more.

    Args:
        indices: the micro-batches that took part.
        backward: ``backward(i)`` computes the gradient of micro-batch ``i``; called in order.
        owned: the parameters to check.
    """
    for index in indices:
        # Gradients add up: without clearing, all later ones would be bad as well.
        clear(owned)
        backward(index)
        if not all_finite([entry.parameter.grad for entry in owned if entry.parameter.grad is not None]):
            return index
    return None
