"""Real tensors that recorded operations read; each is copied before the program writes into it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .calls import written_by
from .values import Value


def memory_of(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; None for a virtual or sparse tensor."""
    if getattr(tensor, "memoryless", False) or tensor.layout is not torch.strided:
        return None  # a wrapper subclass has a storage without memory, a sparse tensor has no storage
    # The address of the StorageImpl: equal for all views, and defined for empty tensors, unlike data_ptr().
    return tensor.untyped_storage()._cdata


class Readings:
    """Values that share memory with real tensors of the program, by that memory."""

    def __init__(self) -> None:
        # Weak: a value that no pending operation reads any more needs no copy.
        self._readers: dict[int | None, list[weakref.ref[Value]]] = {}

    def bind(self, value: Value, tensor: Tensor) -> None:
        """Bind a value to the present numbers of a real tensor, copied only if the program writes into it."""
        # `.data` holds the present memory: `tensor.data = other` replaces it and leaves `_version` unchanged.
        value.full = tensor.data
        # `_version` detects writes that no dispatch mode sees. An inference tensor has no version counter.
        value.source = None if tensor.is_inference() else (tensor, tensor._version)
        self._readers.setdefault(memory_of(tensor), []).append(weakref.ref(value))

    def copy_before(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Copy each tensor that an operator is about to write and that a pending operation reads."""
        self.copy_before_write(written_by(func, args, kwargs))

    def copy_before_write(self, tensors: Iterable[Tensor]) -> None:
        """Copy each of the tensors that a pending operation reads, before the program writes into them."""
        for tensor in tensors:
            for reader in self._readers.pop(memory_of(tensor), ()):
                if (value := reader()) is not None and value.full is not None:
                    value.full, value.source = value.full.clone(), None

    def drop_unused(self) -> None:
        """Remove the entries of values that were freed."""
        # Without this a long block would grow the table by one entry per parameter and operation.
        alive = {key: [one for one in all_ if one() is not None] for key, all_ in self._readers.items()}
        self._readers = {key: readers for key, readers in alive.items() if readers}
