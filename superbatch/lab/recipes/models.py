"""Parts common to the recipes' models: weights drawn from a seed, and accuracy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Make a function seed -> model of one that draws from torch's generator; that stays as it was.

    Examples:
        >>> model = seeded(lambda: nn.Linear(2, 1))
        >>> bool((model(3).weight == model(3).weight).all()), bool((model(3).weight == model(4).weight).all())
        (True, False)
    """

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return model


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first parameter.

    Examples:
        >>> dtype_of(nn.Linear(1, 1).double())
        torch.float64
    """
    return next(model.parameters()).dtype


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Share of correct predictions in percent, in evaluation mode; the model's mode is restored.

    Examples:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> accuracy(model, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        50.0
    """
    training = model.training
    model.eval()
    try:
        correct = model(inputs.to(dtype_of(model))).argmax(1) == labels
    finally:
        model.train(training)
    return 100.0 * int(correct.sum()) / len(labels)
