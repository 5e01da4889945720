"""MNIST, or another data set in its format (IDX), from a local folder.

An IDX file contains two zero bytes, a type code, the number of dimensions, each dimension as big-endian
uint32, and the values (http://yann.lecun.com/exdb/mnist/).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from superbatch.errors import InputError

from .digits import classification
from .digits_data import Classification
from .recipe import Recipe


def mnist(data: str | Path | None = None) -> Recipe:
    """Return a perceptron with 32 hidden units, for a folder with the four files of MNIST."""
    if data is None:
        raise InputError("The recipe mnist needs a folder with the four files of MNIST. Add --data FOLDER.")
    folder = Path(data)
    sets: list[Tensor] = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(find_idx(folder, f"{part}-{kind}")) for kind in ("images", "labels"))
        if len(images) != len(labels):
            raise InputError(
                f"The data folder {str(folder)!r}: {part}-images has {len(images)} images, but {part}-labels "
                f"has {len(labels)} labels. Use files that belong together."
            )
        sets += [images.flatten(1).float() / 255, labels.long()]
    pixels, classes = sets[0].shape[1], int(sets[1].max()) + 1
    return classification(
        "mnist",
        f"a {pixels}-32-{classes} perceptron with ReLU on {len(sets[1])} images in IDX format",
        lambda: nn.Sequential(nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, classes)),
        Classification(*sets),
        learning_rate=0.5,
    )


def find_idx(folder: Path, stem: str) -> Path:
    """Return an IDX file by its usual names: `-idx3-ubyte`, `.idx3-ubyte`, each with or without `.gz`."""
    found = folder.glob(f"{stem}[-.]idx?-ubyte*")
    files = sorted(file for file in found if file.name.endswith(("ubyte", ".gz")))
    if not files:
        raise InputError(
            f"The data folder {str(folder)!r} has no file {stem}-idx?-ubyte or {stem}-idx?-ubyte.gz. Pass a "
            "folder with the four files of MNIST in IDX format."
        )
    return files[0]


def read_idx(path: Path) -> Tensor:
    """Return the values of an IDX file of unsigned bytes, plain or compressed by gzip."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:  # EOFError and zlib.error: a damaged gzip file
        raise _invalid(path, str(error)) from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise _invalid(path, f"it starts with {content[:4].hex(' ')!r}, not 00 00 08 (IDX of unsigned bytes)")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise _invalid(path, "its header is incomplete")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise _invalid(path, f"its header has the shape {shape}, but {len(content) - start} values follow")
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def _invalid(path: Path, reason: str) -> InputError:
    return InputError(f"The file {str(path)!r} cannot be read: {reason}. Use MNIST's files in IDX format.")
