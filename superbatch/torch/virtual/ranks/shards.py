"""Means of gradients over the ranks, for models that may be sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superbatch.torch.window.sync.manual import Manual
from superbatch.torch.window.sync.sync import Sync


def mean(
    sync: Sync, parameters: Sequence[Tensor], gradients: list[Tensor | None], device: torch.device
) -> list[Tensor | None]:
    """Return the means of gradients over the ranks, as DDP defines them; the given ones are not modified.

    Gradients of sharded parameters are returned unchanged, and reduced by `scatter`.
    """
    # A sharded parameter is a DTensor, which has a device mesh.
    reduced = [
        not (sync.has_collective_forwards and hasattr(parameter, "device_mesh")) for parameter in parameters
    ]
    # Divided before the sum, as in DDP, because a sum of float16 gradients may overflow.
    mine = [
        None if gradient is None else gradient / sync.count
        for gradient, is_reduced in zip(gradients, reduced, strict=True)
        if is_reduced
    ]
    plain = [parameter for parameter, is_reduced in zip(parameters, reduced, strict=True) if is_reduced]
    ranks = Manual(sync.group, device) if sync.has_collective_forwards else sync
    # A rank without a gradient sends zeros, because all ranks must issue the same collectives.
    means = iter(ranks.reduce(mine, plain, lambda index: torch.zeros_like(plain[index])) if plain else [])
    return [
        next(means) if is_reduced else gradient
        for gradient, is_reduced in zip(gradients, reduced, strict=True)
    ]


def scatter(sync: Sync) -> None:
    """Reduce the gradients of gathered parameters, and add their means to the gradients of the shards."""
    sync.scale(1 / sync.count)
    sync.flush()
