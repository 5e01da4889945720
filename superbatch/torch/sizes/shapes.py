"""Shape and dtype of one sample, on which the memory of a batch depends besides its number of samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from superbatch.batch.containers import array_shape
from superbatch.batch.tree import map_arrays

# Dtype and shape of one sample, for each array of a batch in the order of its leaves.
Signature = tuple[tuple[str, tuple[int, ...]], ...]


def signature(batch: Any, samples: int) -> Signature:
    """Describe one sample of a batch.

    Args:
        batch: any nested batch.
        samples: number of its samples.

    Returns:
        For each array its dtype and the shape of one sample. Arrays without one entry per sample (tokens of
        packed sequences, leaves that are not split) count with their length divided by the samples, rounded
        up.

    Examples:
        >>> import torch
        >>> signature({"ids": torch.zeros(4, 7, dtype=torch.int64), "y": torch.zeros(4)}, 4)
        (('torch.int64', (7,)), ('torch.float32', ()))
        >>> signature(torch.zeros(10, 3), 4)
        (('torch.float32', (3, 3)),)
    """
    found: list[tuple[str, tuple[int, ...]]] = []

    def note(array: Any) -> Any:
        shape = tuple(array.shape) if isinstance(array, Tensor) else array_shape(array) or ()
        if shape and shape[0] == samples:
            shape = shape[1:]
        elif shape:
            # Rounded up, because samples of a packed sequence have different numbers of tokens.
            shape = (-(-shape[0] // samples), *shape[1:])
        found.append((str(getattr(array, "dtype", "")), shape))
        return array

    kind = type(batch)
    # Exact types: a subclass may hold arrays besides its items.
    if kind in (tuple, list, dict) and all(
        type(leaf) is Tensor for leaf in (batch.values() if kind is dict else batch)
    ):
        for leaf in batch.values() if kind is dict else batch:  # fast path for the most common batches
            note(leaf)
    else:
        map_arrays(note, batch)
    return tuple(found)


def covers(known: Signature, asked: Signature) -> bool:
    """Return whether samples of a known shape need at least as much memory as samples of another shape.

    Args:
        known: signature that was measured.
        asked: signature of the next batch.

    Returns:
        True if both have the same arrays, and no dimension exceeds the known one.

    Examples:
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (37,)),))
        True
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (513,)),))
        False
    """
    return len(known) == len(asked) and all(
        dtype == other
        # Inputs with different numbers of dimensions are not comparable.
        and len(shape) == len(wanted)
        and all(a >= b for a, b in zip(shape, wanted, strict=True))
        for (dtype, shape), (other, wanted) in zip(known, asked, strict=True)
    )


def volume(shape: Signature) -> int:
    """Return the number of elements of one sample.

    Args:
        shape: a signature.

    Returns:
        Number of elements in all arrays together.

    Examples:
        >>> volume((("torch.int64", (7,)), ("torch.float32", ())))
        8
    """
    total = 0
    for _, dimensions in shape:
        product = 1
        for dimension in dimensions:
            product *= dimension
        total += product
    return total
