"""Tasks of the recipe `counting`: count spots in generated images, or learn images in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from superbatch.errors import InputError

SIDE, MOST_SPOTS = 24, 30  # side of a generated image in pixels, and largest number of spots
# For a folder: side of an image in pixels, fewest images, and most images for validation and for the test.
SIDE_READ, LEAST, HELD_OUT = 32, 200, 500
KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Samples:
    """Images and their targets."""

    images: Tensor  # (n, channels, height, width), float32; uint8 if read from files
    targets: Tensor  # (n,): float32 numbers, or int64 classes

    def batch(self, indices: Tensor | slice) -> dict[str, Tensor]:
        """Return the samples of these indices; bytes become floats from 0 to 1."""
        images = self.images[indices]
        return {
            "images": images if images.is_floating_point() else images.float() / 255,
            "targets": self.targets[indices],
        }


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """A task on images, with its loss and its measure of error."""

    description: str  # targets and images, in words
    outputs: int  # number of outputs of the network
    train: Samples
    valid: Samples  # to choose a learning rate
    test: Samples
    loss: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean loss
    error: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> error of each image
    metric: str  # name of the mean error
    unit: str
    margin: float  # difference of the metric that does not matter


def spots(count: int, seed: int) -> Samples:
    """Draw images of 0 to 30 bright spots with noise."""
    g = torch.Generator().manual_seed(seed)
    number = torch.randint(0, MOST_SPOTS + 1, (count,), generator=g)
    centres = SIDE * torch.rand(count, MOST_SPOTS, 2, generator=g)
    bright = 0.7 + 0.6 * torch.rand(count, MOST_SPOTS, generator=g)
    bright = bright * (torch.arange(MOST_SPOTS) < number[:, None])
    pixels = torch.arange(float(SIDE))
    across, down = (torch.exp(-(pixels - centres[:, :, i : i + 1]).square() / 2) for i in (0, 1))
    images = torch.einsum("ns,nsy,nsx->nyx", bright, down, across)
    return Samples((images + 0.2 * torch.randn(images.shape, generator=g))[:, None], number.float())


def generated(training: int) -> ImageTask:
    """Return the task of counting spots."""
    counts = {"train": training, "valid": HELD_OUT, "test": HELD_OUT}
    parts = {name: spots(count, seed) for seed, (name, count) in enumerate(counts.items())}
    description = "0 to 30 spots in generated images"
    return _numbers(parts, centre=15, scale=10, description=description, unit="spots", margin=0.1)


def read_folder(folder: Path) -> ImageTask:
    """Read a folder of images, with one subfolder for each class, into memory as 32 x 32 pixels in colour.

    If the names of all subfolders are numbers, the numbers are the targets of a regression. A fifth of the
    images, at most 500, are held out for validation, and as many for the test.
    """
    # Only files in subfolders: the name of the subfolder is the class.
    paths = [path for path in sorted(folder.glob("*/**/*")) if path.suffix.lower() in KINDS]
    names = [path.relative_to(folder).parts[0] for path in paths]
    classes = sorted(set(names))
    if len(paths) < LEAST or len(classes) < 2:
        raise InputError(
            f"{str(folder)!r} has {len(paths)} images in {len(classes)} subfolders, but "
            f"counting needs at least {LEAST} in 2 subfolders. Store them as FOLDER/CLASS/*.png, or as "
            "FOLDER/NUMBER/*.png to count."
        )
    numbers = all(name.isascii() and name.isdigit() for name in classes)
    images = torch.stack([_pixels(path) for path in paths])
    targets = torch.tensor([float(name) if numbers else classes.index(name) for name in names])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held = min(HELD_OUT, len(images) // 5)
    cuts = zip(("test", "valid", "train"), order.split([held, held, len(images) - 2 * held]), strict=True)
    parts = {name: Samples(images[part], targets[part]) for name, part in cuts}
    if numbers:
        training = parts["train"].targets
        scale = training.std().clamp_min(1e-6).item()
        return _numbers(
            parts,
            centre=training.mean().item(),
            scale=scale,
            description=f"{targets.min():.0f} to {targets.max():.0f} things in images of {str(folder)!r}",
            unit="things",
            margin=float(f"{scale / 100:.1g}"),
        )
    return ImageTask(
        **parts,
        description=f"{len(classes)} classes of images of {str(folder)!r}",
        outputs=len(classes),
        loss=cross_entropy,
        error=lambda outputs, targets: 100 * (outputs.argmax(1) != targets).to(outputs.dtype),
        metric="errors",
        unit="%",
        margin=1.0,
    )


def _numbers(parts: dict[str, Samples], *, centre: float, scale: float, **facts: Any) -> ImageTask:
    """Return the task of predicting a number for each image."""
    return ImageTask(
        **parts,
        **facts,
        outputs=1,
        # The network predicts the number relative to the centre and in units of `scale`, so that outputs are
        # of size 1.
        loss=lambda out, targets: smooth_l1_loss(out[:, 0], (targets - centre) / scale, beta=0.3),
        error=lambda out, targets: (scale * out[:, 0] + centre - targets).abs(),
        metric="mean absolute error",
    )


def _pixels(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("Reading images needs Pillow. Run pip install pillow.") from error
    try:
        with Image.open(path) as opened:
            small: Any = opened.convert("RGB").resize((SIDE_READ, SIDE_READ))
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a damaged PNG
        raise InputError(
            f"{str(path)!r} cannot be read as an image: {error}. Repair or remove it."
        ) from error
    values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return values.reshape(SIDE_READ, SIDE_READ, 3).permute(2, 0, 1).contiguous()
