"""Small user-defined recipes, with only torch and without data on disk. Tests load this file by its path."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from superbatch.lab.recipes import Recipe


def plane(**changes: Any) -> Recipe:
    """Return a recipe of a small network that fits a plane; the loss is a mean over samples."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(240, 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1 * torch.randn(240, generator=generator)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def evaluate(model: nn.Module) -> float:
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            return (model(x.to(dtype))[:, 0] - y.to(dtype)).square().mean().item()

    values: dict[str, Any] = {
        "name": "plane",
        "description": "a plane through noisy points",
        "model": model,
        "samples": 240,
        "batch": lambda indices: {"x": x[indices], "y": y[indices]},
        "loss_fn": lambda model: lambda batch: (model(batch["x"])[:, 0] - batch["y"]).square().mean(),
        "evaluate": evaluate,
        "metric": "squared error",
        "unit": "",
        "margin": 0.2,
        "learning_rates": {"sgd": 0.05, "adam": 0.01},
        "batch_size": 20,
        "updates": 30,
    }
    return Recipe(**(values | changes))


def plane_sum() -> Recipe:
    """Return the same recipe with a sum as its loss."""

    def loss_fn(model: nn.Module):
        return lambda batch: (model(batch["x"])[:, 0] - batch["y"]).square().sum()

    return plane(name="plane-sum", loss_fn=loss_fn, reduction="sum")


def plane_returned() -> Recipe:
    """Return the same recipe with weights from the loss function: only positive targets count."""

    def loss_fn(model: nn.Module):
        def loss(batch):
            counts = (batch["y"] > 0).to(batch["x"].dtype)
            squares = (model(batch["x"])[:, 0] - batch["y"]).square()
            return (squares * counts).sum() / counts.sum().clamp(min=1), int(counts.sum())

        return loss

    return plane(name="plane-returned", loss_fn=loss_fn, weight="returned", counts="positive targets")


def crowd(**changes: Any) -> Recipe:
    """Return a recipe with a loss over all pairs of a batch, BatchNorm and dropout."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))

    def loss_fn(model: nn.Module):
        def loss(batch):
            scores = (
                nn.functional.normalize(model(batch["x"]), dim=1)
                @ nn.functional.normalize(model(-2 * batch["x"]), dim=1).T
            )
            return nn.functional.cross_entropy(5 * scores, torch.arange(len(scores)))

        return loss

    def evaluate(model: nn.Module) -> float:
        return float(sum(parameter.detach().sum() for parameter in model.parameters()))

    values = {"name": "crowd", "description": "each against all", "batch_size": 100, **changes}
    return plane(model=model, loss_fn=loss_fn, evaluate=evaluate, **values)


def no_recipe() -> int:
    """Return something that is not a recipe."""
    return 3


def broken() -> Recipe:
    """Raise an error."""
    raise RuntimeError("no such\nfile")
