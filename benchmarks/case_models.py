"""Models and losses of the scorecard's cases."""

from typing import Any

import torch
from peers.task import Batch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, HIDDEN, CLASSES, VOCABULARY, LENGTH, IGNORED = 6, 8, 4, 11, 5, -100
CLASS_WEIGHTS = (0.2, 1.0, 3.0, 0.5)


def classifier(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(dtype)


def dropout_classifier(dtype: torch.dtype) -> nn.Module:
    """Two layers of dropout. With one, contiguous micro-batches draw the same random numbers as the batch."""
    linear, tanh, head = classifier(dtype)  # type: ignore[misc]  # a Sequential iterates over its modules
    return nn.Sequential(nn.Dropout(0.2), linear, tanh, nn.Dropout(0.5), head)


def zero_classifier(dtype: torch.dtype) -> nn.Module:
    """With zero weights the softmax is exactly 1 / CLASSES, so each gradient is exact in bfloat16."""
    model = nn.Linear(FEATURES, CLASSES).to(dtype)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def token_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Embedding(VOCABULARY, FEATURES),
        nn.Linear(FEATURES, HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, VOCABULARY),
    )
    return nn.Sequential(*layers).to(dtype)


class NestedModel(nn.Module):
    """Model whose input is a dict with a tuple, a dict and strings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = classifier(dtype)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        left, right = inputs["pair"]
        assert all(isinstance(name, str) for name in inputs["meta"]["ids"])
        return self.net(torch.cat([left, right], dim=1) * inputs["meta"]["scale"][:, None])


# Losses: the mean of the user, and its numerator --------------------------------------------------


def cross_entropy(outputs: Tensor, batch: Batch, *, reduction: str = "mean", weight: Any = None) -> Tensor:
    per_class = None if weight is None else outputs.new_tensor(weight)
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), per_class, reduction=reduction)


def weighted_sum(outputs: Tensor, batch: Batch) -> Tensor:
    return (F.cross_entropy(outputs, batch["labels"], reduction="none") * batch["weights"]).sum()


def weighted_mean(outputs: Tensor, batch: Batch) -> Tensor:
    return weighted_sum(outputs, batch) / batch["weights"].sum()


def tokens(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


def sum_of_weights(batch: Batch) -> float:
    return float(batch["weights"].double().sum())


def sum_of_class_weights(batch: Batch) -> float:
    return float(torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)[batch["labels"]].sum())
