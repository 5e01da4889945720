"""Properties of a batch that its memory depends on beside the samples: shape and dtype of one sample."""

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
        samples: the number of its samples.

    Returns:
        For each array its dtype and the shape of one sample. Arrays that do not have one entry per sample
        (tokens of packed sequences, what every micro-batch gets whole) count with their length per sample,
        rounded up.

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
            # Rounded up: a sample of a packed sequence has a number of tokens that varies.
            shape = (-(-shape[0] // samples), *shape[1:])
        found.append((str(getattr(array, "dtype", "")), shape))
        return array

    kind = type(batch)
    # Exact types, as a subclass may hold arrays beside its items.
    if kind in (tuple, list, dict) and all(
        type(leaf) is Tensor for leaf in (batch.values() if kind is dict else batch)
    ):
        for leaf in batch.values() if kind is dict else batch:  # the commonest batches, without a walk
            note(leaf)
    else:
        map_arrays(note, batch)
    return tuple(found)


def covers(known: Signature, asked: Signature) -> bool:
    """Return whether samples of a known shape need at least the memory of another shape's.

    Args:
        known: the signature that was measured.
        asked: the signature of the next batch.

    Returns:
        True if they have the same arrays, and no dimension is larger than the known one.

    Examples:
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (37,)),))
        True
        >>> covers((("torch.int64", (512,)),), (("torch.int64", (513,)),))
        False
    """
    return len(known) == len(asked) and all(
        dtype == other
        # Another number of dimensions is another kind of input.
        and len(shape) == len(wanted)
        and all(a >= b for a, b in zip(shape, wanted, strict=True))
        for (dtype, shape), (other, wanted) in zip(known, asked, strict=True)
    )


def volume(shape: Signature) -> int:
    """The elements of one sample, to tell a small shape from a large one.

    Args:
        shape: a signature.

    Returns:
        The elements of all arrays together.

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
