"""Tasks of the recipe `counting`: spots in generated images; numbers or classes of images in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from superbatch.errors import InputError

SIDE, MOST_SPOTS = 24, 30  # pixels of a side of a generated image, and the most spots of one
# Of a folder: pixels of a side, fewest images, and the most for validation and for the test each.
SIDE_READ, LEAST, HELD_OUT = 32, 200, 500
KINDS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Samples:
    """Images beside what is to be found in them."""

    images: Tensor  # (n, channels, height, width), float32, or uint8 as read from files
    targets: Tensor  # (n,): float32 numbers, or int64 classes

    def batch(self, indices: Tensor | slice) -> dict[str, Tensor]:
        """Select samples; bytes become floats from 0 to 1."""
        images = self.images[indices]
        return {
            "images": images if images.is_floating_point() else images.float() / 255,
            "targets": self.targets[indices],
        }


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """Images, what a network is to find in them, and how far off it is."""

    description: str  # what is found in which images
    outputs: int  # of the network
    train: Samples  # to learn from
    valid: Samples  # to choose a learning rate by
    test: Samples  # to measure with
    loss: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean loss
    error: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> error of each image
    metric: str  # name of the mean error
    unit: str
    margin: float  # a difference of it that does not matter


def spots(count: int, seed: int) -> Samples:
    """Draw images of 0 to 30 bright spots on noise."""
    g = torch.Generator().manual_seed(seed)
    number = torch.randint(0, MOST_SPOTS + 1, (count,), generator=g)
    places = SIDE * torch.rand(count, MOST_SPOTS, 2, generator=g)
    bright = 0.7 + 0.6 * torch.rand(count, MOST_SPOTS, generator=g)
    bright = bright * (torch.arange(MOST_SPOTS) < number[:, None])
    pixels = torch.arange(float(SIDE))
    across, down = (torch.exp(-(pixels - places[:, :, i : i + 1]).square() / 2) for i in (0, 1))
    images = torch.einsum("ns,nsy,nsx->nyx", bright, down, across)
    return Samples((images + 0.2 * torch.randn(images.shape, generator=g))[:, None], number.float())


def generated(training: int) -> ImageTask:
    """Make the task of counting spots."""
    counts = {"train": training, "valid": HELD_OUT, "test": HELD_OUT}
    parts = {name: spots(count, seed) for seed, (name, count) in enumerate(counts.items())}
    what = "0 to 30 spots in generated images"
    return _numbers(parts, centre=15, scale=10, description=what, unit="spots", margin=0.1)


def read_folder(folder: Path) -> ImageTask:
    """Read a folder of images, one subfolder for each class, into memory as 32 x 32 pixels in colour.

    If the names of all subfolders are numbers, each is the number to be counted in its images. A fifth of
    the images, at most 500, are held out for validation and as many for the test.
    """
    classes = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    read = {
        each.name: [path for path in sorted(each.rglob("*")) if path.suffix.lower() in KINDS]
        for each in classes
    }
    files = {name: inside for name, inside in read.items() if inside}
    count = sum(map(len, files.values()))
    if count < LEAST or len(files) < 2:
        raise InputError(
            f"{str(folder)!r} has {count} images in {len(files)} subfolders, and "
            f"counting needs {LEAST} images in 2: FOLDER/CLASS/*.png, or FOLDER/NUMBER/*.png to count."
        )
    numbers = all(name.isascii() and name.isdigit() for name in files)
    of_class = [float(name) for name in files] if numbers else range(len(files))
    images = torch.stack([_pixels(path) for inside in files.values() for path in inside])
    targets = torch.tensor(
        [own for own, inside in zip(of_class, files.values(), strict=True) for _ in inside]
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held = min(HELD_OUT, len(images) // 5)
    cuts = zip(("test", "valid", "train"), order.split([held, held, len(images) - 2 * held]), strict=True)
    parts = {name: Samples(images[part], targets[part]) for name, part in cuts}
    if numbers:
        learnt = parts["train"].targets
        scale = learnt.std().clamp_min(1e-6).item()
        return _numbers(
            parts,
            centre=learnt.mean().item(),
            scale=scale,
            description=f"{min(of_class):.0f} to {max(of_class):.0f} things in images of {str(folder)!r}",
            unit="things",
            margin=float(f"{scale / 100:.1g}"),
        )
    return ImageTask(
        **parts,
        description=f"{len(files)} classes of images of {str(folder)!r}",
        outputs=len(files),
        loss=cross_entropy,
        error=lambda outputs, targets: 100 * (outputs.argmax(1) != targets).to(outputs.dtype),
        metric="errors",
        unit="%",
        margin=1.0,
    )


def _numbers(parts: dict[str, Samples], *, centre: float, scale: float, **facts: Any) -> ImageTask:
    return ImageTask(
        **parts,
        **facts,
        outputs=1,
        # The output is a number in units of `scale` around the centre, as a linear layer finds it easily.
        loss=lambda out, targets: smooth_l1_loss(out[:, 0], (targets - centre) / scale, beta=0.3),
        error=lambda out, targets: (scale * out[:, 0] + centre - targets).abs(),
        metric="mean absolute error",
    )


def _pixels(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("Images are read by Pillow, which is missing. Run pip install pillow.") from error
    try:
        with Image.open(path) as opened:
            small: Any = opened.convert("RGB").resize((SIDE_READ, SIDE_READ))
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a damaged PNG
        raise InputError(
            f"{str(path)!r} cannot be read as an image: {error}. Repair or remove it."
        ) from error
    values = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return values.reshape(SIDE_READ, SIDE_READ, 3).permute(2, 0, 1).contiguous()
