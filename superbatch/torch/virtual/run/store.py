"""Storage of rows for later sweeps: on the device up to a budget, beyond it in the host's memory."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, empty_on_host

from ..ir.shard import Part
from .prefetch import Prefetcher

ELSEWHERE = {"cuda", "xpu", "mps"}  # devices with their own memory, to which rows are prefetched


DEVICE, HOST, WHOLE = range(3)
"""Kinds of bytes: rows on the device, rows in the host's memory, full values."""


class Store:
    """Count of the stored bytes, and the decision between device and host.

    Args:
        device: device of the computation.
        budget: largest number of bytes that stay on the device; None: all. On a CPU the bytes beyond it are
            counted as the host's, in the same memory.

    Attributes:
        most: peak bytes of each kind. Full values are counted if they grow with the batch.
        ahead: prefetcher of rows; None if the device shares the host's memory.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self.budget = budget
        self.most = [0, 0, 0]
        self._now = [0, 0, 0]
        self._owners: dict[ref[Any], list[int]] = {}
        self._freed: list[ref[Any]] = []
        self._to_host = SideStream(device)
        self.ahead = Prefetcher(device, self._to_host) if device.type in ELSEWHERE else None

    def now(self) -> list[int]:
        """Return the bytes of each kind that are stored now."""
        while self._freed:
            for kind, nbytes in enumerate(self._owners.pop(self._freed.pop())):
                self._now[kind] -= nbytes
        return self._now

    def owned_by(self, owner: object) -> list[int]:
        """Return the bytes of each kind of an owner, which count until the owner is freed."""
        # Not a `__del__`: Python swallows exceptions raised there, a Ctrl-C included. The callback is
        # `list.append`, a C function in which no signal handler runs; `now` subtracts later.
        return self._owners.setdefault(ref(owner, self._freed.append), [0, 0, 0])

    def add(self, owner: list[int], kind: int, nbytes: int) -> None:
        """Add bytes to the count of an owner; negative ones subtract."""
        now = self.now() if self._freed else self._now
        owner[kind] += nbytes
        now[kind] += nbytes
        if now[kind] > self.most[kind]:
            self.most[kind] = now[kind]

    def is_full(self, nbytes: int) -> bool:
        """Return whether so much more would exceed the budget."""
        if self.budget is None:
            return False
        now = self.now()
        # Full values cannot move to the host, so they reduce the budget of the rows.
        return now[DEVICE] + now[WHOLE] + nbytes > self.budget

    def keep(self, rows: Tensor) -> tuple[Tensor, bool]:
        """Return the rows in the memory that stores them, and True if it is the host's."""
        # A stored slice would keep alive the whole tensor that it is a slice of.
        if rows.untyped_storage().nbytes() > 2 * rows.nbytes:
            rows = rows.clone()
        host = self.is_full(rows.nbytes)
        if host and self._device.type != "cpu":
            kept = empty_on_host(rows)
            with self._to_host.beside(after_computation=True):
                kept.copy_(rows, non_blocking=True)
            self._to_host.hold(rows)  # or the allocator reuses its memory before the copy has read it
            rows = kept
        return rows, host


class CountedBytes:
    """Memory of a full value that grows with the batch: counted for as long as this object lives.

    Args:
        store: the count.
        nbytes: size of the value.
    """

    def __init__(self, store: Store, nbytes: int) -> None:
        store.add(store.owned_by(self), WHOLE, nbytes)


class RowStore:
    """Stored rows of a value, by micro-batch.

    Args:
        store: decides where they are stored, and counts them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bytes = store.owned_by(self)
        self._rows: dict[int, tuple[Tensor, bool]] = {}

    def put(self, part: Part, rows: Tensor) -> None:
        """Store the rows of a micro-batch."""
        rows, host = self._rows[part.number] = self._store.keep(rows)
        self._store.add(self._bytes, HOST if host else DEVICE, rows.nbytes)

    def get(self, part: Part) -> Tensor:
        """Return the rows on the device that stores them."""
        return self._rows[part.number][0]

    def drop(self, part: Part) -> None:
        """Free the rows of a micro-batch after their last reader."""
        kept = self._rows.pop(part.number, None)
        if kept is not None:
            rows, host = kept
            self._store.add(self._bytes, HOST if host else DEVICE, -rows.nbytes)
