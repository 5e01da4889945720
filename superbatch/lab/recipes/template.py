"""A recipe for the commands of superbatch: a model, its data and its loss. It runs unchanged.

    superbatch verify recipe.py:recipe     compare the accumulated gradient with the batch's
    superbatch fit recipe.py:recipe        find the largest and the fastest micro-batch
    superbatch compare recipe.py:recipe    compare training by accumulation with the real batch
    superbatch advise recipe.py:recipe     estimate the gain from accumulation
    superbatch train recipe.py:recipe      train it; --checkpoints FOLDER resumes

Replace the parts marked REPLACE. The commands import and execute this file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from superbatch.lab.recipes import Recipe

CLASSES = 4


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """REPLACE: the data, here points on the arms of a spiral, one class per arm."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    noise = 0.15 * torch.randn(count, generator=generator)
    angle = 4 * radius + 2 * torch.pi / CLASSES * labels + noise
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


def new_model(seed: int) -> nn.Module:
    """REPLACE: a new model; the same seed gives the same initial weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def recipe() -> Recipe:
    """Return the recipe. Give this function's name after the colon on the command line."""
    inputs, labels = points(2000, seed=1)
    test_inputs, test_labels = points(1000, seed=2)

    def batch(indices: Tensor) -> dict[str, Tensor]:
        # REPLACE: the samples of these indices, as your loader yields them, on the CPU.
        return {"inputs": inputs[indices], "labels": labels[indices]}

    def loss_fn(model: nn.Module):
        # REPLACE: the loss of a batch or micro-batch, as in your training loop.
        def loss(microbatch: dict[str, Tensor]) -> Tensor:
            return functional.cross_entropy(model(microbatch["inputs"]), microbatch["labels"])

        return loss

    def evaluate(model: nn.Module) -> float:
        # REPLACE: one number on held-out data.
        with torch.no_grad():
            dtype = next(model.parameters()).dtype  # compare --dtype float64 trains in float64
            return 100 * (model(test_inputs.to(dtype)).argmax(1) == test_labels).double().mean().item()

    return Recipe(
        name="spiral",
        description="a small network on the arms of a spiral",
        model=new_model,
        samples=len(inputs),
        batch=batch,
        loss_fn=loss_fn,
        batch_size=128,  # samples of one update: the full batch
        # What loss_fn returns: a "mean" (the default of PyTorch's losses) or a "sum".
        reduction="mean",
        # The weight of a micro-batch in the mean: None for its number of samples. For a mean over tokens
        # other than padding, count them:
        #   from superbatch.torch import count_tokens
        #   weight=count_tokens("labels"), counts="tokens",
        weight=None,
        # A loss that compares samples, or BatchNorm: coupled="exact".
        coupled="error",
        # verify and fit do not need the fields below.
        learning_rates={"adam": 0.01, "sgd": 0.5},  # allowed optimizers; the first is the default
        updates=300,
        evaluate=evaluate,
        metric="test accuracy",
        unit="%",
        margin=2.0,  # a difference of the metric that does not matter to you
        metric_step=100 / len(test_inputs),  # its smallest change; 0 for a loss
    )
