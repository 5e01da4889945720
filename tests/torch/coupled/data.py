"""Batches as functions of n: nested tensors with n samples first, the same at every call."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1000 + seed))


def rows(n: int) -> dict[str, Tensor]:
    """6 features, 3 classes."""
    return {"x": normal(n, 6), "y": integers(3, n)}


def row_views(n: int) -> dict[str, Tensor]:
    """Two views of 6 features, 3 classes."""
    x = normal(n, 6)
    return {"x1": x + 0.3 * normal(n, 6, seed=1), "x2": x + 0.3 * normal(n, 6, seed=2), "y": integers(3, n)}


def targets(n: int) -> dict[str, Tensor]:
    """6 features, 3 real numbers to predict."""
    return {"x": normal(n, 6), "y": normal(n, 3, seed=1)}


def images(n: int) -> dict[str, Tensor]:
    """3 channels of 8 x 8, 3 classes."""
    return {"x": normal(n, 3, 8, 8), "y": integers(3, n)}


def image_views(n: int) -> dict[str, Tensor]:
    x = normal(n, 3, 8, 8)
    return {
        "x1": x + 0.3 * normal(n, 3, 8, 8, seed=1),
        "x2": x + 0.3 * normal(n, 3, 8, 8, seed=2),
        "y": integers(3, n),
    }


def tokens(n: int) -> dict[str, Tensor]:
    """7 tokens of a vocabulary of 11, padded: `mask` is true on the first 3 to 7; 3 classes."""
    lengths = integers(8, n, seed=1, low=3)
    return {
        "x": integers(11, n, 7),
        "mask": torch.arange(7) < lengths[:, None],
        "lengths": lengths,
        "y": integers(3, n, seed=2),
    }


def sequences(n: int) -> dict[str, Tensor]:
    """7 steps of 8 features, 3 classes."""
    return {"x": normal(n, 7, 8), "y": integers(3, n)}


def signals(n: int) -> dict[str, Tensor]:
    """4 channels of 12 steps, 3 classes."""
    return {"x": normal(n, 4, 12), "y": integers(3, n)}
