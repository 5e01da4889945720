"""Ways to make an update of one batch: exact in micro-batches, plain accumulation, cached gradients.

Plain accumulation is one loss that is a mean over groups of m samples. It has the gradient of a loop over
micro-batches, but takes less time; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.torch import WholeBatch

BatchLoss = Callable[..., Tensor]  # (model, batch, strength of the point) -> loss
Update = Callable[[Any], object]  # batch -> None; makes one update
# (model, optimizer, strength of the point) -> function that makes the updates
MakeUpdate = Callable[[nn.Module, torch.optim.Optimizer, float], Update]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make the update, and the model that it trains."""

    name: str  # short
    how: str  # in words
    model: Callable[[int], nn.Module]  # seed -> new model
    update: MakeUpdate


def select(table: dict[str, Tensor], indices: Tensor | slice) -> dict[str, Tensor]:
    """Return the samples of these indices from a table of columns."""
    return {name: values[indices] for name, values in table.items()}


def in_microbatches(values: Tensor, size: int | None) -> Tensor:
    """Reshape rows into micro-batches of a size along a new first dimension; None makes a single one.

    Examples:
        >>> in_microbatches(torch.arange(4), 2).tolist()
        [[0, 1], [2, 3]]
    """
    return values.unsqueeze(0) if size is None else values.unflatten(0, (-1, size))


def accumulated(kind: Callable[..., Update], loss: BatchLoss, **options: Any) -> MakeUpdate:
    """Make exact updates with `Accumulator` or `WholeBatch`."""
    return lambda model, optimizer, strength: kind(
        model, optimizer, lambda batch: loss(model, batch, strength), **options
    )


def exact_way(loss: BatchLoss, model: Callable[[int], nn.Module], size: int, how: str) -> Way:
    """Return the exact way, the reference for all others: `superbatch.torch.WholeBatch`."""
    how = f"WholeBatch in micro-batches of {size}: {how}"
    update = accumulated(WholeBatch, loss, microbatch_size=size)
    return Way(name="superbatch", how=how, model=model, update=update)


def plain_way(
    loss: BatchLoss, model: Callable[[int], nn.Module], size: int, how: str, kind: str = "plain"
) -> Way:
    """Return a way with one loss per micro-batch; `loss` has a parameter `size` for their size."""
    how = f"micro-batches of {size}: {how}"
    return Way(
        name=f"{kind}, m = {size}", how=how, model=model, update=one_backward(partial(loss, size=size))
    )


def one_backward(loss: BatchLoss) -> MakeUpdate:
    """Make updates with one backward pass of the loss of the whole batch."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, strength: float) -> Update:
        def update(batch: Any) -> None:
            loss(model, batch, strength).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update

    return make
