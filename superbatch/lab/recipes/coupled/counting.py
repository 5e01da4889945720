"""Counting spots in images: BatchNorm over the whole batch, or over each micro-batch.

Margin and grid were set before the first run of the study: 0.1 spots; rates 0.01 and 0.03.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import batch_norm

from ..models import evaluated, seeded
from .images import ImageTask, Samples, generated, read_folder
from .recipe import CoupledRecipe, Measure, Point
from .ways import LossAt, Way, exact, written_out

BATCH, UPDATES, EXACT = 32, 200, 16


class GroupedBatchNorm(nn.BatchNorm2d):
    """BatchNorm over groups of m samples; running statistics move once for each group."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels)
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (n, channels, height, width)."""
        if not self.training:
            return super().forward(input)
        # The groups' channels side by side are those of one batch of m samples.
        beside = input.unflatten(0, (-1, self.size)).transpose(0, 1).flatten(1, 2)
        count = len(input) // self.size
        means, variances = beside.new_zeros(2, beside.shape[1])  # momentum 1.0: those of this batch
        weight, bias = self.weight.repeat(count), self.bias.repeat(count)
        normal = batch_norm(beside, means, variances, weight, bias, training=True, momentum=1.0)
        for name, found in (("running_mean", means), ("running_var", variances)):
            for of_group in found.chunk(count):
                self.get_buffer(name).lerp_(of_group, 0.1)
        self.get_buffer("num_batches_tracked").add_(count)
        return normal.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


Norm = Callable[[int], nn.Module]


def network(norm: Norm, *, bias: bool, channels: int = 1, outputs: int = 1) -> nn.Sequential:
    """Make the network: three convolutions with a norm each, pooling, one linear layer."""
    # A bias before BatchNorm has no effect: its gradient is rounding, which Adam turns into full steps. The
    # other norms need one.
    layers: list[nn.Module] = []
    for inputs, width, stride in ((channels, 8, 1), (8, 16, 2), (16, 16, 1)):
        layers += [nn.Conv2d(inputs, width, 3, stride, 1, bias=bias), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, outputs))


class FrozenNorm(nn.BatchNorm2d):
    """BatchNorm that always uses its running statistics, as those of a pretrained network are used."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> FrozenNorm:
        """Stay in evaluation mode."""
        super().train(mode=False)
        return self


def loss_of(task: ImageTask) -> LossAt:
    """Make the function that makes the loss of a network, which has no penalty."""
    return lambda model, strength: lambda batch: task.loss(model(batch["images"]), batch["targets"])


def mean_error(model: nn.Module, task: ImageTask, samples: Samples) -> float:
    """Measure the mean error in evaluation mode."""
    batch = samples.batch(slice(None))
    return task.error(evaluated(model, batch["images"]), batch["targets"]).mean().item()


_LIMITS = (
    "In plain classification of digits no loss was found down to m = 2.",
    "The frozen statistics are those of a new network; in a pretrained one they normalise.",
)


def counting(data: str | Path | None = None) -> CoupledRecipe:
    """Make the recipe on a folder of images, or on generated spots."""
    task = generated(BATCH * UPDATES) if data is None else read_folder(Path(data))
    loss_at = loss_of(task)
    sized = partial(network, channels=task.train.images.shape[1], outputs=task.outputs)

    def way(name: str, how: str, norm: Norm, *, bias: bool = True) -> Way:
        model = seeded(partial(sized, norm, bias=bias))
        return Way(name=name, how=how, model=model, update=written_out(loss_at))

    def of_groups(size: int) -> Way:
        how = f"micro-batches of {size}, each with its own BatchNorm statistics"
        return way(f"plain, m = {size}", how, partial(GroupedBatchNorm, size=size), bias=False)

    group, frozen = (
        "GroupNorm of 4 groups in place of BatchNorm: exact in any micro-batches",
        "running statistics as initialised: exact in any micro-batches, and no normalisation",
    )
    whole = seeded(partial(sized, nn.BatchNorm2d, bias=False))
    held_out = f"of {len(task.test.targets)} test images"
    return CoupledRecipe(
        name="counting",
        description=f"a convolutional network with BatchNorm: {task.description}",
        model=whole,
        samples=len(task.train.targets),
        batch=task.train.batch,
        loss_fn=lambda model: loss_at(model, 0.0),
        margin=task.margin,
        learning_rates={"adam": 0.01},
        batch_size=BATCH,
        updates=UPDATES,
        coupled="exact",
        ways=(
            exact(loss_at, whole, EXACT, f"the statistics of all {BATCH} samples"),
            *map(of_groups, (8, 4, 2)),
            way("GroupNorm", group, partial(nn.GroupNorm, 4)),
            way("frozen BatchNorm", frozen, FrozenNorm),
        ),
        points=tuple(Point(learning_rate=rate) for rate in (0.01, 0.03)),
        validate=lambda model: -mean_error(model, task, task.valid),
        measures=(Measure(name=f"{task.metric}, {task.unit}", meaning=held_out, form=".3f"),),
        measure=lambda model: (mean_error(model, task, task.test),),
        lower_is_better=True,
        mechanism="normalising by a micro-batch's own mean and variance removes how much is in it",
        limits=_LIMITS,
    )
