"""Indexing of each sample separately, ``x[arange(N), labels]`` and ``x[:, index]``, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.recorder import Recorder


def index(recording: Recorder, x: Any, indices: Sequence[Any]) -> Any:
    """Return ``x[indices]`` if it indexes each sample separately; else NotImplemented."""
    if not _by_sample(recording, x) or not indices:
        return NotImplemented
    if indices[0] is None:
        feature = _one_of_features(recording, x, indices)
        if feature is None:
            return NotImplemented
        dim, numbers = feature
        selected = x.index_select(dim, numbers.reshape(-1))
        return selected.reshape(*x.shape[:dim], *numbers.shape, *x.shape[dim + 1 :])
    position = _one_of_each(recording, x, indices)
    if position is None:
        return NotImplemented
    return _flat(x, len(indices)).gather(1, position).squeeze(1)


def index_put(
    recording: Recorder, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    """Write into, or add to, the elements that `index` would read."""
    # For values of another dtype index_put itself has to raise.
    if not _by_sample(recording, x) or not indices or recording.value(values).meta.dtype != x.dtype:
        return NotImplemented
    if indices[0] is None:
        feature = _one_of_features(recording, x, indices)
        if feature is None:
            return NotImplemented
        dim, numbers = feature
        # index_put broadcasts the values; index_add and index_copy do not.
        values = values.expand(*x.shape[:dim], *numbers.shape, *x.shape[dim + 1 :])
        values = values.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        write = x.index_add if accumulate else x.index_copy
        return write(dim, numbers.reshape(-1), values)
    position = _one_of_each(recording, x, indices)
    if position is None:
        return NotImplemented
    flat = _flat(x, len(indices))
    values = values.expand(x.shape[0], *flat.shape[2:]).unsqueeze(1)
    write = flat.scatter_add if accumulate else flat.scatter
    return write(1, position, values).reshape(x.shape)


def _by_sample(recording: Recorder, x: Any) -> bool:
    """Return whether each row of dimension 0 is one sample."""
    shard = recording.value(x).shard
    return shard is not None and tuple(shard) == (0, 1, 1)


def _one_of_each(recording: Recorder, x: Any, indices: Sequence[Any]) -> Any:
    """Return the gather index of ``x[arange(N), a, b, ...]`` into the flattened dimensions; else None."""
    first = indices[0]
    if len(indices) < 2 or any(item is None or item.dim() != 1 or _is_mask(item) for item in indices):
        return None
    value = recording.value(first)
    if value.shard is not None or value.full is None or first.shape[0] != x.shape[0]:
        return None
    # Only arange(N) pairs each sample with its own index.
    if not torch.equal(value.full, torch.arange(x.shape[0], device=value.full.device)):
        return None
    # % because an index may be negative. Row-major, as `_flat` flattens.
    position = indices[1] % x.shape[1]
    for dim, item in enumerate(indices[2:], start=2):
        position = position * x.shape[dim] + item % x.shape[dim]
    rest = x.shape[len(indices) :]
    return position.reshape(-1, *([1] * (1 + len(rest)))).expand(x.shape[0], 1, *rest)


def _flat(x: Any, count: int) -> Any:
    return x.reshape(x.shape[0], math.prod(x.shape[1:count]), *x.shape[count:])


def _one_of_features(recording: Recorder, x: Any, indices: Sequence[Any]) -> tuple[int, Tensor] | None:
    """Return the dimension and the index of ``x[:, index]`` with a single full index; else None."""
    indexed = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if len(indexed) != 1:
        return None
    dim, item = indexed[0]
    value = recording.value(item)
    if value.shard is not None:
        return None
    if not _is_mask(item):
        return dim, item % x.shape[dim]
    if value.full is None or item.dim() != 1:
        return None
    return dim, value.full.nonzero().squeeze(1)  # possible, because the numbers of the mask are known


def _is_mask(item: Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)
