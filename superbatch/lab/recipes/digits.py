"""Recipes on scikit-learn's handwritten digits of 8 x 8 pixels, which need no download.

Pixels are divided by 16. 500 samples are for the test (stratified, random_state=0), 1297 for training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .digits_data import DESCRIPTION, LEARNING_RATE, NAME, Classification, facts, load_images
from .models import accuracy, seeded
from .recipe import Recipe


def digits() -> Recipe:
    """Return the multi-layer perceptron 64-32-10 with ReLU."""
    return classification(NAME, DESCRIPTION, _perceptron, load_digits())


def digits_bn() -> Recipe:
    """Return the perceptron with BatchNorm, whose samples are *coupled*."""
    description = "a 64-32-10 perceptron with BatchNorm (coupled samples) on scikit-learn's digits"
    build = partial(_perceptron, batchnorm=True)
    return classification("digits-bn", description, build, load_digits(), batchnorm=True)


def digits_conv() -> Recipe:
    """Return a small convolutional network: two 3 x 3 layers of 8 and 16 channels, then a linear layer.

    It is smooth (GELU, average pooling), so rounding errors in float32 stay small. At the kinks of ReLU and
    maximum pooling they can grow to 1e-3 in a run.
    """
    description = "a small convolutional net on scikit-learn's digits"
    return classification("digits-conv", description, _convolutional, load_digits(), learning_rate=0.5)


def digits_conv_bn() -> Recipe:
    """Return the convolutional network with BatchNorm, whose samples are *coupled*."""
    description = "a small convolutional net with BatchNorm (coupled samples) on scikit-learn's digits"
    build, data = partial(_convolutional, batchnorm=True), load_digits()
    return classification("digits-conv-bn", description, build, data, learning_rate=0.5, batchnorm=True)


def classification(
    name: str,
    description: str,
    build: Callable[[], nn.Module],
    data: Classification,
    *,
    learning_rate: float = LEARNING_RATE,
    batchnorm: bool = False,
) -> Recipe:
    """Return a recipe that classifies images with the mean cross entropy, measured by test accuracy."""
    return Recipe(
        name=name,
        description=description,
        model=seeded(build),
        batch=lambda indices: (data.images[indices], data.labels[indices]),
        loss_fn=lambda model: lambda batch: cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: accuracy(model, data.test_images, data.test_labels),
        batchnorm="per_microbatch" if batchnorm else "error",
        coupled="exact" if batchnorm else "error",
        **facts(len(data.labels), len(data.test_labels), learning_rate),
    )


def load_digits() -> Classification:
    """Return scikit-learn's digits as tensors, with 500 stratified test samples."""
    return Classification(*map(torch.from_numpy, load_images()))


def _perceptron(*, batchnorm: bool = False) -> nn.Module:
    norm = [nn.BatchNorm1d(32)] if batchnorm else []
    return nn.Sequential(nn.Linear(64, 32), *norm, nn.ReLU(), nn.Linear(32, 10))


def _convolutional(*, batchnorm: bool = False) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if batchnorm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.GELU(), nn.AvgPool2d(2)]

    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *block(1, 8), *block(8, 16), nn.Flatten(), nn.Linear(64, 10)
    )
