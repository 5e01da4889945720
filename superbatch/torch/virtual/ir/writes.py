"""Deferred writes into buffers such as running statistics, made once the new numbers are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .readings import memory_of
from .values import Value


class Writes:
    """Pending writes, and the memory that they will change.

    Examples:
        >>> import torch
        >>> writes, buffer = Writes(), torch.zeros(3)
        >>> writes.add(buffer, Value(buffer, buffer.device))
        >>> writes.shares_memory([buffer[1:], 2.0]), writes.shares_memory([[torch.zeros(3)]])
        (True, False)
        >>> len(writes.take()), len(writes)
        (1, 0)
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Value]] = []
        # A set, because every operation on a real tensor calls `shares_memory`: searching the list would take
        # time quadratic in the number of BatchNorms.
        self._memory: set[int | None] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tensor: Tensor, value: Value) -> None:
        """Register the write of a value into a tensor."""
        # `.data` has the same memory but its own version counter. As in torch's BatchNorm, the write leaves
        # the buffer's version unchanged; otherwise autograd would raise in the backward. The reference also
        # keeps the memory alive, so that no other tensor gets its address.
        memory = tensor.data
        self._waiting.append((memory, value))
        self._memory.add(memory_of(memory))

    def shares_memory(self, args: Iterable[Any]) -> bool:
        """Return whether an argument, or an item of one, shares memory with a pending write."""
        flat = (item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,)))
        return any(isinstance(item, Tensor) and memory_of(item) in self._memory for item in flat)

    def take(self) -> list[tuple[Tensor, Value]]:
        """Remove the pending writes, and return them for the caller to make."""
        # Removed first: making them runs operations, which call `shares_memory` again.
        waiting, self._waiting, self._memory = self._waiting, [], set()
        return waiting
