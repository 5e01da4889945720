"""Functions that the recipes share: models with seeded weights, evaluation and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a function from a seed to a new model; it does not change torch's global generator."""

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first parameter."""
    return next(model.parameters()).dtype


@torch.no_grad()
def evaluated(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs in evaluation mode, with inputs cast to the model's dtype; restore the mode."""
    training = model.training
    model.eval()
    try:
        return model(inputs.to(dtype_of(model)))
    finally:
        model.train(training)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the percentage of correct predictions in evaluation mode."""
    return 100.0 * int((evaluated(model, inputs).argmax(1) == labels).sum()) / len(labels)
