"""Contrastive pairs: two noisy, shifted views of a digit must find each other among the batch (InfoNCE).

The loss of a pair depends on all other pairs of the batch: samples are *coupled*, and micro-batches taken one
by one have other negatives than the batch. So `superbatch.torch.WholeBatch` computes the loss of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from .digits import load_digits
from .digits_data import Classification
from .models import dtype_of, seeded
from .recipe import Recipe

TEMPERATURE = 0.2


def pairs() -> Recipe:
    """Representations of digits learnt from pairs of views; measured by the nearest neighbour's label.

    The model is smooth (GELU): at the kinks of ReLU a difference of float32 rounding can grow to percents of
    the weights, since Adam makes steps of full size from the smallest gradient.
    """
    data = load_digits()
    generator = torch.Generator().manual_seed(0)
    first, second = view(data.images, generator), view(data.images, generator)

    def loss_fn(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Tensor]:
        def views(name: str, batch: Mapping[str, Tensor]) -> Tensor:
            return normalize(model(batch[name]), dim=1)

        return lambda batch: info_nce(views("first", batch), views("second", batch))

    return Recipe(
        name="pairs",
        description="representations of scikit-learn's digits from pairs of views (coupled samples)",
        model=seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))),
        samples=len(data.labels),
        batch=lambda indices: {"first": first[indices], "second": second[indices]},
        loss_fn=loss_fn,
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
    """Shift each 8 x 8 image by up to one pixel each way and add noise of standard deviation 0.1."""
    padded = pad(images.unflatten(1, (8, 8)), (1, 1, 1, 1))
    shifts = torch.randint(3, (len(images), 2), generator=generator).tolist()
    moved = torch.stack([image[y : y + 8, x : x + 8] for image, (y, x) in zip(padded, shifts, strict=True)])
    return moved.flatten(1) + 0.1 * torch.randn(images.shape, generator=generator)


def info_nce(first: Tensor, second: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Symmetric InfoNCE of unit vectors (..., m, d): each must pick its partner among all m.

    ``mean of -log softmax(z_i . z'_j / temperature)[i, i]`` over rows and columns.
    """
    scores = first @ second.mT / temperature
    partner = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape[:-1])
    return (cross_entropy(scores.mT, partner) + cross_entropy(scores, partner)) / 2


@torch.no_grad()
def nearest_neighbour_accuracy(model: nn.Module, data: Classification) -> float:
    """Percent of test images whose nearest training image, as the model represents it, has their label."""
    dtype = dtype_of(model)
    train, test = (normalize(model(x.to(dtype)), dim=1) for x in (data.images, data.test_images))
    nearest = (test @ train.T).argmax(1)
    return 100.0 * int((data.labels[nearest] == data.test_labels).sum()) / len(data.test_labels)
