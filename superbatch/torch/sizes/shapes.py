"""Shape and dtype of one sample; with the number of samples, they determine the memory of a batch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from superbatch.batch.containers import array_shape
from superbatch.batch.tree import map_arrays

# Dtype and shape of one sample, for each array of a batch in the order of its leaves.
Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(batch: Any, samples: int) -> Signature:
    """Describe one sample of a batch.

    Returns:
        For each array its dtype and the shape of one sample. Some arrays have no entry per sample, such as
        tokens of packed sequences: their length is divided by the number of samples and rounded up.

    Examples:
        >>> import torch
        >>> signature({"ids": torch.zeros(4, 7, dtype=torch.int64), "y": torch.zeros(4)}, 4)
        (('torch.int64', (7,)), ('torch.float32', ()))
        >>> signature(torch.zeros(10, 3), 4)
        (('torch.float32', (3, 3)),)
    """
    found: list[tuple[str, tuple[int, ...]]] = []

    def add(array: Any) -> Any:
        shape = tuple(array.shape) if isinstance(array, Tensor) else array_shape(array) or ()
        if shape and shape[0] == samples:
            shape = shape[1:]
        elif shape:
            # Rounded up, because samples of a packed sequence have different numbers of tokens.
            shape = (-(-shape[0] // samples), *shape[1:])
        found.append((str(getattr(array, "dtype", "")), shape))
        return array

    # Exact types: a subclass may hold arrays besides its items.
    items = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else ()
    if items and all(type(item) is Tensor for item in items):  # fast path for the most common batches
        for item in items:
            add(item)
    else:
        map_arrays(add, batch)
    return tuple(found)


def covers(measured: Signature, wanted: Signature) -> bool:
    """Return whether samples of a measured shape need at least as much memory as samples of another shape.

    Returns:
        True if both have the same arrays, and no dimension exceeds the measured one.

    Examples:
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (37,)),))
        True
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (513,)),))
        False
    """
    return len(measured) == len(wanted) and all(
        dtype == other
        # Inputs with different numbers of dimensions are not comparable.
        and len(shape) == len(needed)
        and all(a >= b for a, b in zip(shape, needed, strict=True))
        for (dtype, shape), (other, needed) in zip(measured, wanted, strict=True)
    )


def volume(shape: Signature) -> int:
    """Return the number of elements of one sample, in all arrays together.

    Examples:
        >>> volume((("torch.int64", (7,)), ("torch.float32", ())))
        8
    """
    return sum(math.prod(dimensions) for _, dimensions in shape)
