"""Real tensors that operations read, which may be written before these run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .calls import written_by
from .values import Value


def memory_of(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's memory; None for a virtual or sparse one."""
    if getattr(tensor, "memoryless", False) or tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage()._cdata


class Readings:
    """Values that are real tensors, keyed by their memory."""

    def __init__(self) -> None:
        self._readers: dict[int | None, list[weakref.ref[Value]]] = {}

    def read(self, value: Value, tensor: Tensor) -> None:
        """Let a value be a real tensor, as it is now: it is copied if the program writes into it later."""
        # The memory of now: after `tensor.data = another` the tensor has other numbers, and the same version.
        value.whole = tensor.data
        value.source = None if tensor.is_inference() else (tensor, tensor._version)
        self._readers.setdefault(memory_of(tensor), []).append(weakref.ref(value))

    def before(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Copy what an operator is about to write, where operations that have not run yet read it."""
        self.before_writing(written_by(func, args, kwargs))

    def before_writing(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is about to be written, where operations that have not run yet read it."""
        for tensor in tensors:
            for reader in self._readers.pop(memory_of(tensor), ()):
                if (value := reader()) is not None and value.whole is not None:
                    value.whole, value.source = value.whole.clone(), None

    def forget_unused(self) -> None:
        """Forget values that nothing needs any more."""
        alive = {place: [one for one in all_ if one() is not None] for place, all_ in self._readers.items()}
        self._readers = {place: readers for place, readers in alive.items() if readers}
