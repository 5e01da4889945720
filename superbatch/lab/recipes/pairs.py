"""Contrastive pairs: match two noisy, shifted views of a digit among all digits of the batch (InfoNCE).

The loss of a pair depends on all other pairs of the batch, so samples are *coupled*. A micro-batch alone has
fewer negatives; `superbatch.torch.WholeBatch` computes the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from .digits import load_digits
from .digits_data import Classification
from .models import dtype_of, seeded
from .recipe import Recipe

TEMPERATURE = 0.2


def pairs() -> Recipe:
    """Return representation learning from pairs of views, measured by the nearest neighbour's label.

    The model is smooth (GELU). At the kinks of ReLU, float32 rounding errors can grow to percents of the
    weights, because Adam makes full steps from the smallest gradients.
    """
    data = load_digits()
    generator = torch.Generator().manual_seed(0)
    first, second = view(data.images, generator), view(data.images, generator)

    return Recipe(
        name="pairs",
        description="representations of scikit-learn's digits from pairs of views (coupled samples)",
        model=seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))),
        samples=len(data.labels),
        batch=lambda indices: {"first": first[indices], "second": second[indices]},
        loss_fn=lambda model: partial(_loss, model),
        evaluate=lambda model: nearest_neighbour_accuracy(model, data),
        metric="nearest-neighbour accuracy",
        unit="%",
        margin=0.5,
        metric_step=100 / len(data.test_labels),
        learning_rates={"adam": 2e-3, "adamw": 2e-3, "sgd": 0.06, "momentum": 0.006},
        updates=300,
        coupled="exact",
    )


def view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return 8 x 8 images, each shifted by up to one pixel, with noise of standard deviation 0.1."""
    padded = pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1))
    shifts = torch.randint(3, (len(images), 2), generator=generator).tolist()
    moved = torch.stack([image[y : y + 8, x : x + 8] for image, (y, x) in zip(padded, shifts, strict=True)])
    return moved.flatten(1) + 0.1 * torch.randn(images.shape, generator=generator)


def info_nce(first: Tensor, second: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the symmetric InfoNCE loss of unit vectors (..., m, d): each is matched to its partner among m.

    It is the mean of ``-log softmax(z_i . z'_j / temperature)[i, i]`` over rows and columns.
    """
    scores = first @ second.mT / temperature
    partner = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape[:-1])
    return (cross_entropy(scores.mT, partner) + cross_entropy(scores, partner)) / 2


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    first, second = (normalize(model(batch[name]), dim=1) for name in ("first", "second"))
    return info_nce(first, second)


@torch.no_grad()
def nearest_neighbour_accuracy(model: nn.Module, data: Classification) -> float:
    """Return the percentage of test images with the label of the nearest training image's representation."""
    dtype = dtype_of(model)
    train, test = (normalize(model(x.to(dtype)), dim=1) for x in (data.images, data.test_images))
    nearest = (test @ train.T).argmax(1)
    return 100.0 * int((data.labels[nearest] == data.test_labels).sum()) / len(data.test_labels)
