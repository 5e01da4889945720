"""Make batches from the samples of another one: repeated, replaced, amplified or NaN samples for probes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from superbatch.batch.containers import children, rebuilder
from superbatch.batch.tree import Leaf, leaves, map_leaves
from superbatch.errors import SplitError

from .untouched import as_dtype


def select(
    batch: Any, indices: Sequence[int], *, unsplit: Collection[str] = (), per_sample: Collection[str] = ()
) -> Any:
    """Make a batch of given samples of another, in the given order; samples may be repeated.

    Args:
        batch: a nested batch.
        indices: indices of the samples.
        unsplit: paths of leaves that every batch gets in full.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        A copy with the same structure and `len(indices)` samples.

    Raises:
        SplitError: a leaf has samples of different lengths in one array (a packed sequence).

    Examples:
        >>> select({"x": torch.tensor([5, 6, 7]), "names": ["a", "b", "c"]}, [2, 0, 2])
        {'x': tensor([7, 5, 7]), 'names': ['c', 'a', 'c']}
    """
    lengths = _lengths(batch, unsplit, per_sample)

    def rows(node: Any) -> Any:
        if isinstance(node, Tensor):
            # Indexing copies, so a probe may write into the samples.
            return node[torch.tensor(indices, device=node.device)]
        if isinstance(node, list | tuple):
            # In the type of the list, e.g. a named tuple.
            return rebuilder(node, "")([node[index] for index in indices])
        return node[list(indices)]  # NumPy

    return _map_samples(rows, batch, lengths)


def change_floats(
    fn: Callable[[Tensor], Tensor],
    batch: Any,
    changed: Sequence[int],
    *,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
) -> Any:
    """Apply a function to the floating-point values of some samples; the others stay bit for bit.

    Args:
        fn: function from the rows of the changed samples to new values of the same shape.
        batch: a nested batch of tensors.
        changed: indices of the samples to change.
        unsplit: paths of leaves that every batch gets in full.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        A batch of the same structure; the same object if it has no floating-point tensors.

    Raises:
        SplitError: a leaf has samples of different lengths in one array (a packed sequence).

    Examples:
        >>> change_floats(lambda x: x * 10, (torch.ones(3), torch.ones(3, dtype=torch.long)), [1])
        (tensor([ 1., 10.,  1.]), tensor([1, 1, 1]))
    """
    lengths = _lengths(batch, unsplit, per_sample)

    def rows(node: Any) -> Any:
        if not isinstance(node, Tensor) or not node.is_floating_point():
            return node
        where = torch.tensor(changed, device=node.device)
        return node.index_copy(0, where, fn(node[where]).to(node.dtype))

    return _map_samples(rows, batch, lengths)


def converted(batch: Any, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Move the tensors of a batch to a device, and convert floating-point ones to a dtype; None: unchanged.

    Examples:
        >>> converted({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.long)}, torch.float64, None)
        {'x': tensor([1.], dtype=torch.float64), 'n': tensor([1])}
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # A single call for both conversions copies only once.
            return leaf.to(device=device or leaf.device, dtype=as_dtype(leaf.dtype, dtype))
        kind = getattr(getattr(leaf, "dtype", None), "kind", None)
        return leaf.astype("float64") if dtype is torch.float64 and kind == "f" else leaf  # NumPy

    return map_leaves(convert, batch)


def same_values(a: Any, b: Any) -> bool:
    """Return whether two batches of one structure have equal tensors, and other objects equal by `==`.

    Examples:
        >>> same_values([torch.ones(2)], [torch.ones(2)]), same_values([torch.ones(2)], [torch.zeros(2)])
        (True, False)
    """
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    entries = children(a)
    if entries is None:
        # NumPy compares entry by entry, other objects as a whole.
        return bool((a == b) if not hasattr(a, "all") else (a == b).all())
    pairs = zip(entries, children(b) or [], strict=True)
    return all(same_values(mine, theirs) for (_, mine), (_, theirs) in pairs)


def _lengths(batch: Any, unsplit: Collection[str], per_sample: Collection[str]) -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in leaves(batch, unsplit=unsplit, per_sample=per_sample)}


def _map_samples(fn: Callable[[Any], Any], batch: Any, lengths: dict[str, Leaf], path: str = "") -> Any:
    leaf = lengths.get(path)
    if leaf is not None:
        return batch if leaf.length is None else fn(_checked(batch, leaf))
    entries = children(batch) or []
    join = f"{path}.{{}}" if path else "{}"
    new = [_map_samples(fn, value, lengths, join.format(name)) for name, value in entries]
    # An unchanged part stays the same object, as documented in `change_floats`.
    if all(after is before for after, (_, before) in zip(new, entries, strict=True)):
        return batch
    return rebuilder(batch, path)(new)


def _checked(node: Any, leaf: Leaf) -> Any:
    # A packed sequence has more rows than samples.
    if len(node) == leaf.length:
        return node
    raise SplitError(
        f"The leaf {leaf.path!r} is packed ({len(node)} rows for {leaf.length} samples), so its samples "
        "cannot be exchanged. Probe an unpacked batch of the same samples."
    )
