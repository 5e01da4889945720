"""Buffers that are written once their new numbers are there, such as running statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .readings import memory_of
from .values import Value


class Writes:
    """The writes that wait, and the memory that they are for.

    Every operation on a real tensor asks whether its memory waits. So that memory is kept in a set, which
    grows with each write: to make it anew for each question takes a time quadratic in the BatchNorms of a
    model.

    Examples:
        >>> import torch
        >>> writes, buffer = Writes(), torch.zeros(3)
        >>> writes.add(buffer, Value(buffer, buffer.device))
        >>> writes.wait_for([buffer[1:], 2.0]), writes.wait_for([[torch.zeros(3)]])
        (True, False)
        >>> len(writes.take()), len(writes)
        (1, 0)
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Value]] = []
        self._memory: set[int | None] = set()

    def __len__(self) -> int:
        """Return the number of pending writes."""
        return len(self._waiting)

    def add(self, tensor: Tensor, value: Value) -> None:
        """Let a tensor wait for a value.

        Its memory of now is written, without a new version, as BatchNorm does: autograd has the old one to
        compare with.
        """
        memory = tensor.data  # holds it: its address is no other's while it waits
        self._waiting.append((memory, value))
        self._memory.add(memory_of(memory))

    def wait_for(self, args: Iterable[Any]) -> bool:
        """Return whether an argument, or an item of one, is in memory with a pending write."""
        flat = (item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,)))
        return any(isinstance(item, Tensor) and memory_of(item) in self._memory for item in flat)

    def take(self) -> list[tuple[Tensor, Value]]:
        """Return the pending writes, for the caller to make; none is pending any more."""
        waiting, self._waiting, self._memory = self._waiting, [], set()
        return waiting
