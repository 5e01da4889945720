"""Parts common to the recipes' models: weights drawn from a seed, and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Make a function seed -> model of one that draws from torch's generator; that stays as it was."""

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first parameter."""
    return next(model.parameters()).dtype


@torch.no_grad()
def evaluated(model: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs in evaluation mode, of inputs in the model's dtype; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        return model(inputs.to(dtype_of(model)))
    finally:
        model.train(training)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of correct predictions in percent, in evaluation mode."""
    return 100.0 * int((evaluated(model, inputs).argmax(1) == labels).sum()) / len(labels)
