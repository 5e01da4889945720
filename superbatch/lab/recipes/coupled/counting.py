"""Counting spots in images, with BatchNorm over the whole batch or over each micro-batch.

Margin and grid were set before the first run of the study: 0.1 spots; rates 0.01 and 0.03.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..models import evaluated, seeded
from .images import ImageTask, Samples, generated, read_folder
from .recipe import CoupledRecipe, Measure, Point
from .ways import BatchLoss, Way, exact_way, one_backward

BATCH, UPDATES, EXACT = 32, 200, 16


class GroupedBatchNorm(nn.BatchNorm2d):
    """BatchNorm over groups of m samples; running statistics are updated once for each group."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels)
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, channels, height, width)."""
        forward = super().forward
        return torch.cat([forward(group) for group in input.split(self.size)])


Norm = Callable[[int], nn.Module]


def network(norm: Norm, *, bias: bool, channels: int = 1, outputs: int = 1) -> nn.Sequential:
    """Return the network: three convolutions with a norm each, pooling, one linear layer."""
    # BatchNorm cancels a bias before it. The gradient of such a bias is rounding, which Adam turns into full
    # steps. The other norms need a bias.
    layers: list[nn.Module] = []
    for inputs, width, stride in ((channels, 8, 1), (8, 16, 2), (16, 16, 1)):
        layers += [nn.Conv2d(inputs, width, 3, stride, 1, bias=bias), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, outputs))


class FrozenNorm(nn.BatchNorm2d):
    """BatchNorm that always uses its running statistics, as is usual with a pretrained network."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> FrozenNorm:
        """Stay in evaluation mode."""
        super().train(mode=False)
        return self


def loss_of(task: ImageTask) -> BatchLoss:
    """Return the loss of a task as a function of model and batch; it has no penalty."""
    return lambda model, batch, strength=0.0: task.loss(model(batch["images"]), batch["targets"])


def mean_error(model: nn.Module, task: ImageTask, samples: Samples) -> float:
    """Return the mean error in evaluation mode."""
    batch = samples.batch(slice(None))
    return task.error(evaluated(model, batch["images"]), batch["targets"]).mean().item()


_LIMITS = (
    "In plain classification of digits, micro-batches were as good down to m = 2.",
    "The frozen statistics are those of a new network; in a pretrained one they normalise.",
)


def counting(data: str | Path | None = None) -> CoupledRecipe:
    """Return the recipe for a folder of images, or for generated spots."""
    task = generated(BATCH * UPDATES) if data is None else read_folder(Path(data))
    loss = loss_of(task)
    sized = partial(network, channels=task.train.images.shape[1], outputs=task.outputs)

    def way(name: str, how: str, norm: Norm, *, bias: bool = True) -> Way:
        model = seeded(partial(sized, norm, bias=bias))
        return Way(name=name, how=how, model=model, update=one_backward(loss))

    def of_groups(size: int) -> Way:
        how = f"micro-batches of {size}, each with its own BatchNorm statistics"
        return way(f"plain, m = {size}", how, partial(GroupedBatchNorm, size=size), bias=False)

    group, frozen = (
        "GroupNorm with 4 groups instead of BatchNorm: exact in any micro-batches",
        "initial running statistics: exact in any micro-batches, but no normalisation",
    )
    whole = seeded(partial(sized, nn.BatchNorm2d, bias=False))
    held_out = f"of {len(task.test.targets)} test images"
    return CoupledRecipe(
        name="counting",
        description=f"a convolutional network with BatchNorm: {task.description}",
        model=whole,
        samples=len(task.train.targets),
        batch=task.train.batch,
        loss_fn=lambda model: partial(loss, model),
        margin=task.margin,
        learning_rates={"adam": 0.01},
        batch_size=BATCH,
        updates=UPDATES,
        ways=(
            exact_way(loss, whole, EXACT, f"the statistics of all {BATCH} samples"),
            *map(of_groups, (8, 4, 2)),
            way("GroupNorm", group, partial(nn.GroupNorm, 4)),
            way("frozen BatchNorm", frozen, FrozenNorm),
        ),
        points=tuple(Point(learning_rate=rate) for rate in (0.01, 0.03)),
        validate=lambda model: -mean_error(model, task, task.valid),
        measures=(Measure(name=f"{task.metric}, {task.unit}", meaning=held_out, form=".3f"),),
        measure=lambda model: (mean_error(model, task, task.test),),
        lower_is_better=True,
        mechanism="mean and variance of a micro-batch depend on its spots, and normalisation removes them",
        limits=_LIMITS,
    )
