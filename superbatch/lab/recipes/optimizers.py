"""The optimizers that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, optim

OptimizerFactory = Callable[[Iterable["Tensor"], float], Any]


def sgd(parameters: Iterable[Tensor], learning_rate: float) -> optim.Optimizer:
    """Plain stochastic gradient descent, without momentum."""
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate)


def momentum(parameters: Iterable[Tensor], learning_rate: float) -> optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    import torch

    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def adam(parameters: Iterable[Tensor], learning_rate: float) -> optim.Optimizer:
    """Adam with torch's defaults."""
    import torch

    return torch.optim.Adam(parameters, lr=learning_rate)


def adamw(parameters: Iterable[Tensor], learning_rate: float) -> optim.Optimizer:
    """AdamW with torch's defaults (weight decay 0.01)."""
    import torch

    return torch.optim.AdamW(parameters, lr=learning_rate)


OPTIMIZERS: Mapping[str, OptimizerFactory] = {"sgd": sgd, "momentum": momentum, "adam": adam, "adamw": adamw}
