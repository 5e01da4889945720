"""Participants of an `Accumulator` that a recipe asks for."""

from __future__ import annotations

from typing import Any

from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm


def participants_of(batchnorm: str) -> list[Any]:
    """Return what a recipe's `batchnorm` stands for.

    Examples:
        >>> participants_of("error"), participants_of("frozen")
        ([], [FrozenBatchNorm()])
    """
    return {"frozen": [FrozenBatchNorm()], "per_microbatch": [GhostBatchNorm()]}.get(batchnorm, [])
