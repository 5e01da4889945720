"""Counting spots in images: BatchNorm over the whole batch, or over each micro-batch.

Margin and grid were set before the first run of the study: 0.1 spots; rates 0.01 and 0.03.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from ..models import dtype_of, seeded
from .recipe import CoupledRecipe, Measure, Point
from .ways import Loss, Way, whole_batch, written_out

BATCH, UPDATES, EXACT = 32, 200, 16
SIDE, MOST = 24, 30
"""Pixels of a side, and the most spots of an image."""

HELD_OUT = 500


class GroupedBatchNorm(nn.Module):
    """BatchNorm2d over groups of m samples; running statistics move once for each group.

    Args:
        channels: of the input.
        size: samples of a group.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, images: Tensor) -> Tensor:
        """Normalise (n, channels, height, width)."""
        if self.training:
            return (self._normalised(images) * _wide(self.weight)) + _wide(self.bias)
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return (images - _wide(self.running_mean)) * _wide(scale) + _wide(self.bias)

    def _normalised(self, images: Tensor) -> Tensor:
        grouped = images.unflatten(0, (-1, self.size))
        var, mean = torch.var_mean(grouped, (1, 3, 4), unbiased=False, keepdim=True)
        count = grouped[0, :, 0].numel()
        with torch.no_grad():
            pairs = zip(mean.flatten(1), var.flatten(1) * count / max(count - 1, 1), strict=True)
            for group_mean, group_var in pairs:
                self.running_mean.lerp_(group_mean, 0.1)
                self.running_var.lerp_(group_var, 0.1)
        return ((grouped - mean) * (var + 1e-5).rsqrt()).flatten(0, 1)


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None]


Norm = Callable[[int], nn.Module]


def network(norm: Norm, *, bias: bool) -> nn.Sequential:
    """Make the network: three convolutions with a norm each, pooling, one linear layer.

    Args:
        norm: channels -> a module.
        bias: of the convolutions. BatchNorm takes it away again: its gradient is rounding, which Adam would
            turn into full steps. The other norms need it.

    Returns:
        Images (n, 1, 24, 24) -> (n, 1).
    """
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 8, 1), (8, 16, 2), (16, 16, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=bias), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 1))


class FrozenNorm(nn.BatchNorm2d):
    """BatchNorm that always uses its running statistics, as those of a pretrained network are used.

    Args:
        channels: of the input.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> FrozenNorm:
        """Stay in evaluation mode."""
        super().train(mode=False)
        return self


def spots(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images of 0 to 30 bright spots on noise.

    Args:
        count: of images.
        seed: of the generator.

    Returns:
        Images (count, 1, 24, 24) and the number of spots of each, float32.

    Examples:
        >>> images, numbers = spots(3, seed=0)
        >>> images.shape, bool((numbers <= 30).all())
        (torch.Size([3, 1, 24, 24]), True)
    """
    g = torch.Generator().manual_seed(seed)
    number = torch.randint(0, MOST + 1, (count,), generator=g)
    places = SIDE * torch.rand(count, MOST, 2, generator=g)
    bright = 0.7 + 0.6 * torch.rand(count, MOST, generator=g)
    bright = bright * (torch.arange(MOST) < number[:, None])
    pixels = torch.arange(float(SIDE))
    across, down = (torch.exp(-(pixels - places[:, :, i : i + 1]).square() / 2) for i in (0, 1))
    images = torch.einsum("ns,nsy,nsx->nyx", bright, down, across)
    return (images + 0.2 * torch.randn(images.shape, generator=g))[:, None], number.float()


def loss_at(model: nn.Module, strength: float) -> Loss:
    """Make the loss: smooth L1 of the scaled count."""

    def loss_fn(batch: Any) -> Tensor:
        return smooth_l1_loss(model(batch["images"])[:, 0], (batch["numbers"] - 15) / 10, beta=0.3)

    return loss_fn


@torch.no_grad()
def mean_error(model: nn.Module, images: Tensor, numbers: Tensor) -> float:
    """Measure the mean absolute error in spots, in evaluation mode; the model's mode is restored."""
    training = model.training
    model.eval()
    try:
        found = 10 * model(images.to(dtype_of(model)))[:, 0] + 15
    finally:
        model.train(training)
    return (found - numbers).abs().mean().item()


def _plain(size: int) -> Way:
    return Way(
        name=f"plain, m = {size}",
        how=f"micro-batches of {size}, each with its own BatchNorm statistics",
        model=seeded(partial(network, lambda channels: GroupedBatchNorm(channels, size), bias=False)),
        update=written_out(loss_at),
    )


def counting() -> CoupledRecipe:
    """Make the recipe.

    Examples:
        >>> counting().batch(torch.arange(4))["images"].shape
        torch.Size([4, 1, 24, 24])
    """
    images, numbers = spots(BATCH * UPDATES, seed=0)
    valid, test = spots(HELD_OUT, seed=1), spots(HELD_OUT, seed=2)
    exact = seeded(partial(network, nn.BatchNorm2d, bias=False))
    error = Measure(name="mean absolute error, spots", meaning="of 500 test images", form=".3f")
    return CoupledRecipe(
        name="counting",
        description="a convolutional network with BatchNorm that counts 0 to 30 spots in generated images",
        model=exact,
        samples=len(images),
        batch=lambda indices: {"images": images[indices], "numbers": numbers[indices]},
        loss_fn=lambda model: loss_at(model, 0.0),
        evaluate=lambda model: mean_error(model, *test),
        metric="mean absolute error",
        unit="spots",
        margin=0.1,
        learning_rates={"adam": 0.01},
        batch_size=BATCH,
        updates=UPDATES,
        coupled="exact",
        ways=(
            Way(
                name="superbatch",
                how=f"WholeBatch in micro-batches of {EXACT}: the statistics of all {BATCH} samples",
                model=exact,
                update=whole_batch(loss_at, EXACT),
            ),
            *map(_plain, (8, 4, 2)),
            Way(
                name="GroupNorm",
                how="GroupNorm of 4 groups in place of BatchNorm: exact in any micro-batches",
                model=seeded(partial(network, partial(nn.GroupNorm, 4), bias=True)),
                update=written_out(loss_at),
            ),
            Way(
                name="frozen BatchNorm",
                how="running statistics as initialised: exact in any micro-batches, and no normalisation",
                model=seeded(partial(network, FrozenNorm, bias=True)),
                update=written_out(loss_at),
            ),
        ),
        points=tuple(Point(learning_rate=rate) for rate in (0.01, 0.03)),
        validate=lambda model: -mean_error(model, *valid),
        measures=(error,),
        measure=lambda model: (mean_error(model, *test),),
        lower_is_better=True,
        mechanism="normalising by a micro-batch's own mean and variance removes how much is in it",
        limits=(
            "In plain classification of digits no loss was found down to m = 2.",
            "The frozen statistics are those of a new network; in a pretrained one they normalise.",
        ),
    )
