"""Real tensors that recorded operations read, and copies of them before the program writes into them."""

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
        return None  # a wrapper subclass has a storage without memory, a sparse tensor none
    # The address of the StorageImpl: equal for all views, and defined for empty tensors, unlike data_ptr().
    return tensor.untyped_storage()._cdata


class Readings:
    """Values that stand for real tensors, by the memory of these tensors."""

    def __init__(self) -> None:
        # Weak: a value that no pending operation reads any more needs no copy.
        self._readers: dict[int | None, list[weakref.ref[Value]]] = {}

    def read(self, value: Value, tensor: Tensor) -> None:
        """Bind a value to a real tensor as it is now, without a copy unless the program writes into it."""
        # `.data` pins the present memory: `tensor.data = another` swaps it and leaves `_version` unchanged.
        value.full = tensor.data
        # The version finds writes that no dispatch mode sees; an inference tensor has no version counter.
        value.source = None if tensor.is_inference() else (tensor, tensor._version)
        self._readers.setdefault(memory_of(tensor), []).append(weakref.ref(value))

    def before(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Copy each tensor that an operator is about to write, if a pending operation reads it."""
        self.before_writing(written_by(func, args, kwargs))

    def before_writing(self, tensors: Iterable[Tensor]) -> None:
        """Copy each tensor that is about to be written, if a pending operation reads it."""
        for tensor in tensors:
            for reader in self._readers.pop(memory_of(tensor), ()):
                if (value := reader()) is not None and value.full is not None:
                    value.full, value.source = value.full.clone(), None

    def forget_unused(self) -> None:
        """Remove the entries of values that were freed."""
        # Without this a long block would grow the table by one entry per parameter and operation.
        alive = {place: [one for one in all_ if one() is not None] for place, all_ in self._readers.items()}
        self._readers = {place: readers for place, readers in alive.items() if readers}
