"""Ways to make an update of one batch: exact in micro-batches, plain accumulation, cached gradients.

Plain accumulation is written as one loss over groups of m samples. The mean over the groups has the gradient
of the loop over micro-batches, without the loop's time; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.torch import WholeBatch

Loss = Callable[[Any], Tensor]
LossAt = Callable[[nn.Module, float], Loss]  # (model, strength of the point) -> the loss function of a batch
Update = Callable[[Any], object]  # makes one update from a batch
# (model, optimizer, strength of the point) -> the function that makes the updates.
MakeUpdate = Callable[[nn.Module, torch.optim.Optimizer, float], Update]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make the update, and the model that it trains."""

    name: str  # short
    how: str  # in words
    model: Callable[[int], nn.Module]  # seed -> a new model
    update: MakeUpdate  # makes the function that makes the updates


def groups(values: Tensor, size: int | None) -> Tensor:
    """Cut rows into micro-batches along a new first dimension.

    Examples:
        >>> groups(torch.arange(4), 2).tolist()
        [[0, 1], [2, 3]]
    """
    return values.unsqueeze(0) if size is None else values.unflatten(0, (-1, size))


def accumulated(kind: Callable[..., Update], loss_at: LossAt, **options: Any) -> MakeUpdate:
    """Make exact updates by `Accumulator` or `WholeBatch`."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, strength: float) -> Update:
        return kind(model, optimizer, loss_at(model, strength), **options)

    return make


def exact(loss_at: LossAt, model: Callable[[int], nn.Module], size: int, how: str) -> Way:
    """The way that all others are compared with: `superbatch.torch.WholeBatch`."""
    how = f"WholeBatch in micro-batches of {size}: {how}"
    return Way(
        name="superbatch", how=how, model=model, update=accumulated(WholeBatch, loss_at, microbatch_size=size)
    )


def plain(
    loss_at: Callable[..., Loss], model: Callable[[int], nn.Module], size: int, how: str, kind: str = "plain"
) -> Way:
    """A way that takes micro-batches one by one; `loss_at` has a parameter for their size."""
    how = f"micro-batches of {size}: {how}"
    update = written_out(partial(loss_at, size=size))
    return Way(name=f"{kind}, m = {size}", how=how, model=model, update=update)


def written_out(loss_at: LossAt) -> MakeUpdate:
    """Make updates by one backward of a loss that is written over groups of samples."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, strength: float) -> Update:
        loss_fn = loss_at(model, strength)

        def update(batch: Any) -> None:
            loss_fn(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return update

    return make
