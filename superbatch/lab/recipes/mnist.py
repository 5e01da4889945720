"""MNIST, or any data set in its format, from a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from superbatch.errors import InputError

from .digits import classification
from .digits_data import Classification
from .idx import find_idx, read_idx
from .recipe import Recipe


def mnist(data: str | Path | None = None) -> Recipe:
    """A perceptron with one hidden layer of 32 on a folder with the four files of MNIST, plain or ``.gz``."""
    if data is None:
        raise InputError("The recipe mnist needs a folder of data and downloads none. Add --data FOLDER.")
    folder = Path(data)
    images, test_images = (_images(folder, part) for part in ("train", "t10k"))
    labels, test_labels = (_labels(folder, part) for part in ("train", "t10k"))
    for part, inputs, targets in (("train", images, labels), ("t10k", test_images, test_labels)):
        if len(inputs) != len(targets):
            raise InputError(
                f"The data folder {str(folder)!r}: {part}-images has {len(inputs)} images and {part}-labels "
                f"has {len(targets)} labels. Give files that belong together."
            )
    pixels, classes = images.shape[1], int(labels.max()) + 1
    return classification(
        "mnist",
        f"a {pixels}-32-{classes} perceptron with ReLU on {len(labels)} images in IDX format",
        lambda: nn.Sequential(nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, classes)),
        Classification(images, labels, test_images, test_labels),
        learning_rate=0.5,
    )


def _images(folder: Path, part: str) -> Tensor:
    return read_idx(find_idx(folder, f"{part}-images")).flatten(1).float() / 255


def _labels(folder: Path, part: str) -> Tensor:
    return read_idx(find_idx(folder, f"{part}-labels")).long()
