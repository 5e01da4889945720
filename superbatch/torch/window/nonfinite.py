"""Description of the micro-batch, loss and parameter that are NaN or infinite, for the error."""

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
        index: the micro-batch, or None if it is on another rank or unknown.
        loss: its loss.
        parameter: the first parameter with a gradient that is not finite.
        whole: the loss was computed on the whole batch at once, which is then the only micro-batch.
        term: the name of the loss among several.
        droppable: whether ``nonfinite="skip_microbatch"`` is possible, so that the error can advise it.
        any_rank: the micro-batch may also be the one that another rank ran at the same time.
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
            count: number of micro-batches of the window.
            skipping: the user has passed ``nonfinite="skip_update"``, so it is not advised.

        Examples:
            >>> Culprit(1, math.nan, "fc.weight").text(4)[:38]
            'In micro-batch 1 of 0..3 with loss nan'
        """
        if self.whole:
            given = f"a batch with loss {self.loss:g}"
        elif self.index is None:
            given = "a micro-batch of this window (on another rank, or an unknown one)"
        else:
            of = f" of the term {self.term!r}" if self.term else ""
            rank = " (or in that of another rank in the same turn)" if self.any_rank else ""
            given = f"micro-batch {self.index} of 0..{count - 1} with loss {self.loss:g}{of}{rank}"
        # A finite loss may have an infinite gradient, e.g. sqrt at 0.
        what = "the loss" if self.loss is not None and not math.isfinite(self.loss) else "the gradient"
        where = ""
        if self.parameter:
            where = f" (the first parameter with a non-finite gradient is {self.parameter!r})"
        others = []
        if self.droppable and not self.whole:
            others.append('pass nonfinite="skip_microbatch" to leave it and its weight out')
        if not skipping:
            others.append('pass nonfinite="skip_update" to skip the update')
        check = f"Check that {'batch' if self.whole else 'micro-batch'}"
        return (
            f"In {given}, {what} is not finite{where}. No update was made, and everything is as before the "
            f"window. {', or '.join([check, *others])}."
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
        if gradient is not None and not all_finite([gradient]):
            return entry.name
    return None


def first_bad_microbatch(
    indices: Iterable[int], backward: Callable[[int], None], owned: list[ManagedParameter]
) -> int | None:
    """Run each micro-batch once more, and return the first whose own gradient is not finite.

    Args:
        indices: the micro-batches that took part.
        backward: ``backward(i)`` computes the gradient of micro-batch ``i``; called in order.
        owned: the parameters to check.
    """
    for index in indices:
        # Cleared, because gradients add up and a NaN stays in the sum.
        clear(owned)
        backward(index)
        if not all_finite([entry.parameter.grad for entry in owned if entry.parameter.grad is not None]):
            return index
    return None
