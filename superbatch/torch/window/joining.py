"""Join micro-batches to the batch that they were cut from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from superbatch.batch.containers import array_shape, children, is_flat, is_scalar, rebuilder
from superbatch.batch.tree import count_samples
from superbatch.errors import SplitError


def joined(microbatches: Sequence[Any]) -> Any:
    """Return the batch whose samples are those of all micro-batches, in their order.

    Args:
        microbatches: batches of one structure. Tensors and arrays have the samples first; lists have one
            plain object per sample. All other values must be equal in all micro-batches.

    Returns:
        A batch of that structure.

    Raises:
        SplitError: the structures, types or shapes differ, or samples cannot be counted.

    Examples:
        >>> joined([{"x": torch.ones(2, 3), "rate": 0.1}, {"x": torch.ones(1, 3), "rate": 0.1}])["x"].shape
        torch.Size([3, 3])
    """
    if len(microbatches) == 1:
        return microbatches[0]
    counts = [count_samples(microbatch) for microbatch in microbatches]
    batch = _joined(microbatches, "")
    # E.g. a list of per-batch numbers that was concatenated as if it were per sample.
    if count_samples(batch) != sum(counts):
        raise _cannot(f"they have {counts} samples", f"together they would have {count_samples(batch)}")
    return batch


def _joined(parts: Sequence[Any], path: str) -> Any:
    first, where = parts[0], f"their parts {path!r}" if path else "they"
    # type, not isinstance: a subclass may have another structure.
    if any(type(part) is not type(first) for part in parts):
        raise _cannot(f"{where} are of different types", "they have no structure in common")
    shape = array_shape(first)
    if shape:
        return _concatenated(parts, where)
    if is_flat(first):  # one plain object for each sample
        return type(first)(one for part in parts for one in part)
    entries = None if shape is not None or is_scalar(first) else children(first)
    if entries is not None:
        others = [children(part) or () for part in parts]
        # Keys and their order, because entries are joined by position.
        if any([key for key, _ in other] != [key for key, _ in entries] for other in others):
            raise _cannot(f"{where} have different entries", "they have no structure in common")
        return rebuilder(first, path)(
            [
                _joined([other[number][1] for other in others], f"{path}.{key}" if path else str(key))
                for number, (key, _) in enumerate(entries)
            ]
        )
    # `is` first: == on a large array compares its elements.
    if any(part is not first and not bool(part == first) for part in parts):
        raise _cannot(f"{where} differ", "a value without samples must be equal in all of them")
    return first


def _concatenated(parts: Sequence[Any], where: str) -> Any:
    # Dimension 0 counts samples; the others must fit.
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise _cannot(
            f"{where} have samples of the shapes {', '.join(map(str, shapes))}", "only one shape is possible"
        )
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    # NumPy is not imported for a program that has no arrays.
    if "numpy" in sys.modules and isinstance(parts[0], sys.modules["numpy"].ndarray):
        return sys.modules["numpy"].concatenate(list(parts))
    raise _cannot(f"{where} are {type(parts[0]).__name__}", "only tensors and NumPy arrays can be joined")


def _cannot(given: str, wrong: str) -> SplitError:
    return SplitError(
        f"The micro-batches of a window cannot be joined: {given}; {wrong}. Pad them to one shape, or pass "
        "the batch itself instead of a Window."
    )
