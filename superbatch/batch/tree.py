# pyright: strict
"""Nested batches: their leaves, their number of samples, and micro-batches cut from them.

* `plan` walks the structure of a batch once; each micro-batch then costs only its slices.
* The path of a part joins keys with dots: "labels", "0.images", "meta.ids". The batch itself is "".
* A micro-batch has the structure and the types of its batch. Arrays are views where the framework has views;
  a part that is kept whole is the same object in every micro-batch.
* An ambiguous batch raises an error with the paths and the remedy. Nothing is guessed from the most frequent
  length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..errors import InputError
from .containers import array_shape, children, is_scalar, is_torch_packed_sequence, rebuilder
from .paths import Leaf as Leaf
from .paths import get as get
from .plan import Plan as Plan
from .plan import plan as plan
from .plan import walked
from .refusals import MOST_LEVELS, too_deep

__all__ = ["Leaf", "Plan", "count_samples", "get", "leaves", "map_arrays", "map_leaves", "plan", "take"]


def leaves(batch: Any, *, unsplit: Collection[str] = (), per_sample: Collection[str] = ()) -> list[Leaf]:
    """List the leaves of a batch without checking that lengths agree.

    Args:
        batch: any nested batch (see `plan`).
        unsplit: paths kept whole.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        The leaves in order. Arrays of packed sequences have the number of sequences as their length.

    Raises:
        InputError: when a declared path is not in the batch.
        SplitError: when a part is of an unknown type.

    Examples:
        >>> leaves({"x": memoryview(b"abc"), "y": ["a", "b"], "name": "train"})
        [Leaf(path='x', length=3), Leaf(path='y', length=2), Leaf(path='name', length=None)]
    """
    walk, _ = walked(batch, unsplit, per_sample)
    return walk.leaves


def count_samples(batch: Any, *, unsplit: Collection[str] = (), per_sample: Collection[str] = ()) -> int:
    """Count the samples of a batch.

    Args:
        batch: any nested batch (see `plan`).
        unsplit: paths kept whole.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        The number of samples, at least 1.

    Raises:
        InputError, SplitError: as `plan`.

    Examples:
        >>> count_samples((memoryview(b"abc"), ["a", "b", "c"]))
        3
    """
    return plan(batch, unsplit=unsplit, per_sample=per_sample).samples


def take(
    batch: Any, start: int, stop: int, *, unsplit: Collection[str] = (), per_sample: Collection[str] = ()
) -> Any:
    """Cut samples start..stop out of a batch; to cut one batch several times, call `plan` once instead.

    Args:
        batch: any nested batch (see `plan`).
        start: the first sample.
        stop: one past the last sample; 0 <= start < stop <= samples.
        unsplit: paths kept whole.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        A micro-batch of the same structure and types.

    Raises:
        InputError: when start and stop are out of this range, or a declared path is not in the batch.
        SplitError: as `plan`.

    Examples:
        >>> take({"x": ["a", "b", "c"], "scale": 2}, 1, 3)
        {'x': ['b', 'c'], 'scale': 2}
    """
    planned = plan(batch, unsplit=unsplit, per_sample=per_sample)
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= planned.samples:
        raise InputError(
            f"start={start!r}, stop={stop!r} is not a range of a batch of {planned.samples} samples. Pass "
            "ints with 0 <= start < stop <= samples."
        )
    return planned.take(start, stop)


def map_arrays(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every array of a batch, also inside lists of samples.

    Args:
        fn: called with each array, of any number of dimensions.
        batch: any nested batch.

    Returns:
        A batch of the same structure and types. A container in which nothing changed is the same object.

    Examples:
        >>> map_arrays(bytes, {"x": memoryview(b"abc"), "names": ["a", "b", "c"]})
        {'x': b'abc', 'names': ['a', 'b', 'c']}
    """
    return map_leaves(lambda leaf: leaf if array_shape(leaf) is None else fn(leaf), batch)


def map_leaves(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to everything in a batch except containers and plain scalars.

    Args:
        fn: called with each array and with each object of unknown type (also torch's PackedSequence).
        batch: any nested batch.

    Returns:
        A batch of the same structure and types. A container in which nothing changed is the same object.

    Examples:
        >>> map_leaves(lambda leaf: type(leaf).__name__, [memoryview(b"abc"), object(), 3, "text"])
        ['memoryview', 'object', 3, 'text']
    """
    return _mapped(fn, batch, 0)


def _mapped(fn: Callable[[Any], Any], batch: Any, depth: int) -> Any:
    if is_scalar(batch):
        return batch
    if array_shape(batch) is not None or is_torch_packed_sequence(batch):
        return fn(batch)
    entries = children(batch)
    if entries is None:
        return fn(batch)
    if depth == MOST_LEVELS:
        raise too_deep("")
    new = [_mapped(fn, value, depth + 1) for _, value in entries]
    if all(after is before for after, (_, before) in zip(new, entries, strict=True)):
        return batch  # unchanged: the same object, not a copy
    return rebuilder(batch, "")(new)
