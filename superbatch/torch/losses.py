"""The losses of a window: numbers that keep no graph alive, read from a device all at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import normalize
from ..errors import InputError, explain
from .sync import Ranks


class Losses:
    """What was given to ``backward`` so far, by micro-batch.

    Examples:
        >>> losses = Losses()
        >>> losses.add(1, torch.tensor(0.5, requires_grad=True))
        >>> 1 in losses, losses.on_host(3)
        (True, [0.0, 0.5, 0.0])
    """

    def __init__(self) -> None:
        self._values: dict[int, float | Tensor] = {}
        self._on_device = False  # whether any is still to be read

    def __contains__(self, index: int) -> bool:
        return index in self._values

    def __len__(self) -> int:
        return len(self._values)

    def add(self, index: int, loss: Tensor) -> None:
        """Note a loss; several losses of one micro-batch add up."""
        # A loss on a device is read at the boundary, with the others, so that nothing waits for it here.
        if loss.is_cpu:
            value = loss.item()
        else:
            value, self._on_device = loss.detach(), True
        self._values[index] = self._values[index] + value if index in self._values else value

    def finite(self, index: int) -> bool:
        """Whether a micro-batch's loss is neither NaN nor infinite."""
        return math.isfinite(self._values[index])

    def on_host(self, count: int) -> list[float]:
        """Return the losses of micro-batches 0..count-1; 0 for those without one."""
        found: dict[int, Any] = self._values
        if self._on_device:
            on_device = {index: loss for index, loss in found.items() if isinstance(loss, Tensor)}
            values = torch.stack([loss.reshape(()) for loss in on_device.values()]).tolist()
            found = {**found, **dict(zip(on_device, values, strict=True))}
        return [found.get(index, 0.0) for index in range(count)]

    def state(self) -> dict[int, float]:
        """Return the losses so far, by micro-batch."""
        return {index: float(loss) for index, loss in self._values.items()}

    def load_state(self, state: dict[int, float]) -> None:
        """Go on from what `state` returned."""
        self._values = dict(state)
        self._on_device = False


def over_ranks(
    losses: list[float],
    weights: list[normalize.Number],
    bad: list[int],
    reduction: normalize.Reduction,
    ranks: Ranks,
    mark: int = 0,
) -> tuple[float, normalize.Number, bool]:
    """Return the batch's loss and weight, and whether any rank has a loss that is not finite.

    Args:
        losses: of this rank's micro-batches.
        weights: of them.
        bad: the indices of those that are not finite.
        reduction: what a loss is.
        ranks: to sum over.
        mark: how this rank stands with measuring the noise (see `noise.windows.mark_of`).

    Raises:
        InputError: the ranks stand differently there, on every rank: a rank that went on would wait for ever.

    Examples:
        >>> over_ranks([1.0, 3.0], [1, 1], [], "mean", Ranks(()))
        (2.0, 2, False)
    """
    total = normalize.loss_sum(losses, weights, reduction=reduction)
    weight = normalize.total_weight(weights)
    if not ranks.shared:
        return normalize.per_weight(total, weight), weight, bool(bad)
    total, weight, bad_ranks, marks, squares = ranks.sum([total, weight, bool(bad), mark, mark * mark])
    if int(marks) ** 2 != ranks.count * int(squares):  # equal where all marks are, and only there
        raise InputError(
            explain(
                f"{ranks.count} ranks that measure the noise, but do not agree on which windows",
                "it is measured on all of them together; a state was loaded, or `noise` was passed, on some "
                "ranks only",
                "load the same state_dict() on every rank, and make every Accumulator with the same `noise`",
            )
        )
    weight = int(weight) if weight.is_integer() else weight
    return normalize.per_weight(total, weight), weight, bool(bad_ranks)


def pair_of(returned: Any) -> tuple[Any, Any]:
    """Return the loss and the weight that a loss function returned.

    Raises:
        InputError: it returned something else.

    Examples:
        >>> pair_of((0.5, 3))
        (0.5, 3)
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise InputError(
        explain(
            f"a loss_fn that returned {type(returned).__name__}",
            'weight="returned" states that it returns a pair',
            "return (loss, weight)",
        )
    )


def alone(returned: Any) -> Any:
    """Return the loss that a loss function returned without a weight.

    Raises:
        InputError: it returned a tuple.

    Examples:
        >>> alone(0.5)
        0.5
    """
    if not isinstance(returned, tuple):
        return returned
    raise InputError(
        explain(
            "a loss_fn that returned a tuple",
            "it is not stated that the loss comes with its weight",
            'return the loss alone, or state weight="returned" and return (loss, weight)',
        )
    )
