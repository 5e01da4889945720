"""The `Accumulator` of a recipe: its loss, what a micro-batch counts, and the participants it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from superbatch.torch import Accumulator
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm

from ..recipes import Recipe


def participants_of(batchnorm: str) -> list[Any]:
    """Return what a recipe's `batchnorm` stands for."""
    return {"frozen": [FrozenBatchNorm()], "per_microbatch": [GhostBatchNorm()]}.get(batchnorm, [])


def accumulator(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Any,
    *,
    loss_fn: Callable[[Any], Any] | None = None,
    participants: Sequence[Any] = (),
    **options: Any,
) -> Accumulator:
    """Make the accumulator of a recipe, whose own loss and participants may be wrapped and added to."""
    return Accumulator(
        model,
        optimizer,
        recipe.loss_fn(model) if loss_fn is None else loss_fn,
        reduction=recipe.reduction,
        weight=recipe.weight,
        participants=[*participants_of(recipe.batchnorm), *participants],
        **options,
    )
