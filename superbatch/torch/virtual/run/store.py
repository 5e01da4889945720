"""Storage of rows for later sweeps: on the device up to a budget, and beyond the budget on the host."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, empty_on_host

from ..ir.shard import BatchSlice
from .prefetch import Prefetcher

OWN_MEMORY = {"cuda", "xpu", "mps"}  # devices with their own memory, to which rows are prefetched


DEVICE, HOST, FULL = range(3)
"""Kinds of bytes: rows on the device, rows in the host's memory, full values."""


class Store:
    """Count of the stored bytes, which decides between device and host.

    Args:
        device: device of the computation.
        budget: largest number of bytes to store on the device; None: no limit. On a CPU the bytes beyond the
            budget are in the same memory, but counted as the host's.

    Attributes:
        peak_bytes: peak bytes of each kind. Full values are counted if they grow with the batch.
        prefetcher: prefetcher of rows; None if the device shares the host's memory.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self.budget = budget
        self.peak_bytes = [0, 0, 0]
        self._now = [0, 0, 0]
        self._owners: dict[ref[Any], list[int]] = {}
        self._freed: list[ref[Any]] = []
        self._to_host = SideStream(device)
        self.prefetcher = Prefetcher(device, self._to_host) if device.type in OWN_MEMORY else None

    def current_bytes(self) -> list[int]:
        """Return the stored bytes of each kind."""
        while self._freed:
            for kind, nbytes in enumerate(self._owners.pop(self._freed.pop())):
                self._now[kind] -= nbytes
        return self._now

    def owned_by(self, owner: object) -> list[int]:
        """Return the list of an owner's bytes of each kind, which count until the owner is freed."""
        # Not `__del__`, where Python ignores exceptions, even a KeyboardInterrupt. The callback `list.append`
        # is a C function, in which no signal handler runs. `current_bytes` subtracts the bytes later.
        return self._owners.setdefault(ref(owner, self._freed.append), [0, 0, 0])

    def add(self, owner: list[int], kind: int, nbytes: int) -> None:
        """Add bytes to the count of an owner; negative ones subtract."""
        # Bytes of freed owners are subtracted first, because they would raise the peak.
        now = self.current_bytes() if self._freed else self._now
        owner[kind] += nbytes
        now[kind] += nbytes
        if now[kind] > self.peak_bytes[kind]:
            self.peak_bytes[kind] = now[kind]

    def is_full(self, nbytes: int) -> bool:
        """Return whether storing more bytes on the device would exceed the budget."""
        if self.budget is None:
            return False
        now = self.current_bytes()
        # Full values cannot move to the host, so they reduce the budget of the rows.
        return now[DEVICE] + now[FULL] + nbytes > self.budget

    def keep(self, rows: Tensor) -> tuple[Tensor, bool]:
        """Return the rows in the memory that stores them, and True if that is the host's."""
        # A small slice is copied, because it would keep its whole storage alive.
        if rows.untyped_storage().nbytes() > 2 * rows.nbytes:
            rows = rows.clone()
        host = self.is_full(rows.nbytes)
        if host and self._device.type != "cpu":
            on_host = empty_on_host(rows)
            with self._to_host.beside(after_computation=True):
                on_host.copy_(rows, non_blocking=True)
            self._to_host.hold(rows)  # so that the allocator does not reuse the memory before it is read
            rows = on_host
        return rows, host


class CountedBytes:
    """Token for the bytes of a full value, which count in a store until the token is freed."""

    def __init__(self, store: Store, nbytes: int) -> None:
        store.add(store.owned_by(self), FULL, nbytes)


class RowStore:
    """Stored rows of a value, by micro-batch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bytes = store.owned_by(self)
        self._rows: dict[int, tuple[Tensor, bool]] = {}

    def put(self, microbatch: BatchSlice, rows: Tensor) -> None:
        """Store the rows of a micro-batch."""
        rows, host = self._rows[microbatch.number] = self._store.keep(rows)
        self._store.add(self._bytes, HOST if host else DEVICE, rows.nbytes)

    def get(self, microbatch: BatchSlice) -> Tensor:
        """Return the rows on the device that stores them."""
        return self._rows[microbatch.number][0]

    def drop(self, microbatch: BatchSlice) -> None:
        """Free the rows of a micro-batch after their last reader."""
        stored = self._rows.pop(microbatch.number, None)
        if stored is not None:
            rows, host = stored
            self._store.add(self._bytes, HOST if host else DEVICE, -rows.nbytes)
