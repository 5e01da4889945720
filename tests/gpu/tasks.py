"""Small trainings on a device, and comparison of their gradients with the large batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import Accumulator, WholeBatch, count_tokens

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Task:
    """A model, a batch and a loss function."""

    name: str
    model: nn.Module
    batch: Batch
    loss: Loss
    weight: str | None = None


class LanguageModel(nn.Module):
    """A causal transformer over 97 tokens."""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 97)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            ids.shape[1], device=ids.device, dtype=self.head.weight.dtype
        )
        return self.head(self.layers(self.embedding(ids), mask=mask, is_causal=True))


def token_mean(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over tokens that are not ignored."""
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def class_mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def wide(device: torch.device, *, small: bool) -> tuple[nn.Module, Batch, int]:
    """Return a model with large activations and few parameters, its batch on the host and its samples."""
    # On a GPU activations take more memory than Adam's state, so that smaller micro-batches help.
    width, samples = (64, 32) if small else (4096, 16384)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())))
    batch = {"x": torch.randn(samples, width), "y": torch.randn(samples, width)}
    return model.to(device), batch, samples


def wide_loss(model: nn.Module, part: Batch) -> Tensor:
    """Mean of the squared errors of `wide`."""
    return F.mse_loss(model(part["x"]), part["y"])


def _convnet(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        norm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def images(samples: int, dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(samples, 3, 16, 16, dtype=dtype), "y": torch.randint(10, (samples,))}


def tokens(samples: int, length: int = 12) -> Batch:
    ids, labels = torch.randint(97, (samples, length)), torch.randint(97, (samples, length))
    for row, count in enumerate(torch.linspace(1, length, samples).long().tolist()):
        labels[row, count:] = -100
    return {"ids": ids, "labels": labels}


def mlp(device: torch.device, dtype: torch.dtype = torch.float64, samples: int = 21) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 10)).to(device, dtype)
    batch = {"x": torch.randn(samples, 12, dtype=dtype), "y": torch.randint(10, (samples,))}
    return Task("mlp", model, batch, class_mean)


def convnet(device: torch.device, dtype: torch.dtype = torch.float64, samples: int = 21) -> Task:
    torch.manual_seed(0)
    model = _convnet(lambda width: nn.GroupNorm(2, width)).to(device, dtype)
    return Task("convnet", model, images(samples, dtype), class_mean)


def batchnorm(device: torch.device, dtype: torch.dtype = torch.float64, samples: int = 21) -> Task:
    torch.manual_seed(0)
    model = _convnet(nn.BatchNorm2d).to(device, dtype)
    return Task("convnet with BatchNorm", model, images(samples, dtype), class_mean)


def transformer(
    device: torch.device, dtype: torch.dtype = torch.float64, samples: int = 21, dropout: float = 0.0
) -> Task:
    torch.manual_seed(0)
    model = LanguageModel(dropout=dropout).to(device, dtype)
    return Task("transformer", model, tokens(samples), token_mean, weight="labels")


SEPARABLE = (mlp, convnet, transformer)


def on(device: torch.device, batch: Batch) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients on the host in float64."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"premise: {name} has a gradient"
        found[name] = parameter.grad.detach().cpu().double()
    assert any(bool(gradient.any()) for gradient in found.values()), "premise: gradients are not zero"
    return found


def large_batch(
    task: Task, device: torch.device, *, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the gradients of the whole batch, from a copy of the model."""
    model = copy.deepcopy(task.model)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        loss = task.loss(model, on(device, task.batch))
    loss.backward()
    return gradients_of(model)


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient, with 1e-3 of the total norm as a floor."""
    floor = 1e-3 * float(torch.stack([g.norm() for g in expected.values()]).norm())
    return max(float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items())


def assert_exact(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: Any) -> float:
    worst = error(found, expected)
    assert worst <= tolerance, f"{what}: relative error {worst:.2e} > {tolerance:.0e}"
    return worst


def accumulated(
    task: Task,
    device: torch.device,
    microbatch_size: Any,
    *,
    autocast: torch.dtype | None = None,
    whole: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Make one update of a copy of the model; return the optimizer's gradients and the update record.

    `whole` uses `WholeBatch`, for a task without weights.
    """
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update(gradients_of(model)))

    def loss_fn(microbatch: Batch) -> Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return task.loss(model, microbatch)

    options["microbatch_size"] = microbatch_size
    if task.weight is not None:
        options["weight"] = count_tokens(task.weight)
    accumulate = (WholeBatch if whole else Accumulator)(model, optimizer, loss_fn, **options)
    update = accumulate(task.batch)
    assert update.made, update.skipped
    return seen, update
