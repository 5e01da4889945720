"""Storage of rows for later sweeps: on the device up to a budget, then in the host's memory."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, empty_on_host

from ..ir.layout import Part
from .prefetch import Prefetcher

ELSEWHERE = {"cuda", "xpu", "mps"}  # devices whose memory is not the host's


DEVICE, HOST, WHOLE = range(3)
"""Kinds of bytes: of rows on the device, of rows in the host's memory, of whole values."""


class Store:
    """Counts what is kept, and decides where.

    Args:
        device: where the rows are computed.
        budget: most bytes that stay there; None: all do. On a CPU both places are the same memory, and what
            is beyond the budget is only counted as the host's.

    Attributes:
        most: bytes of each kind, the most at a time. Whole values are those that grow with the batch. They
            cannot go to the host, so the budget of rows is smaller by them.
        ahead: brings rows to the device; None where there is no other place.
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
        """Return the bytes of each kind that are kept now."""
        while self._freed:
            for kind, nbytes in enumerate(self._owners.pop(self._freed.pop())):
                self._now[kind] -= nbytes
        return self._now

    def owned_by(self, owner: object) -> list[int]:
        """Return the bytes of each kind of an owner, which count until it is freed.

        Python ignores an error that is raised while an object is freed, so a Ctrl-C would be lost in a
        ``__del__``. The callback of the weak reference is a function of C, and `now` subtracts.
        """
        return self._owners.setdefault(ref(owner, self._freed.append), [0, 0, 0])

    def add(self, owner: list[int], kind: int, nbytes: int) -> None:
        """Count more bytes of an owner, or fewer."""
        now = self.now() if self._freed else self._now
        owner[kind] += nbytes
        now[kind] += nbytes
        if now[kind] > self.most[kind]:
            self.most[kind] = now[kind]

    def is_full(self, nbytes: int) -> bool:
        """Return whether that many more bytes would exceed the budget."""
        if self.budget is None:
            return False
        now = self.now()
        return now[DEVICE] + now[WHOLE] + nbytes > self.budget

    def keep(self, piece: Tensor) -> tuple[Tensor, bool]:
        """Return the rows, where they are to be kept, and whether that is the host."""
        # A slice would keep alive all that it is a slice of.
        if piece.untyped_storage().nbytes() > 2 * piece.nbytes:
            piece = piece.clone()
        host = self.is_full(piece.nbytes)
        if host and self._device.type != "cpu":
            kept = empty_on_host(piece)
            with self._to_host.beside(after_computation=True):
                kept.copy_(piece, non_blocking=True)
            self._to_host.hold(piece)
            piece = kept
        return piece, host


class Held:
    """Memory of a whole value that grows with the batch: counted from here until it is freed.

    Args:
        store: what counts it.
        nbytes: how much.
    """

    def __init__(self, store: Store, nbytes: int) -> None:
        store.add(store.owned_by(self), WHOLE, nbytes)


class RowStore:
    """Kept rows of a value, by micro-batch.

    Args:
        store: where.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bytes = store.owned_by(self)
        self._pieces: dict[int, tuple[Tensor, bool]] = {}

    def put(self, part: Part, piece: Tensor) -> None:
        """Keep the rows of a micro-batch."""
        piece, host = self._pieces[part.number] = self._store.keep(piece)
        self._store.add(self._bytes, HOST if host else DEVICE, piece.nbytes)

    def get(self, part: Part) -> Tensor:
        """Return the rows, where they are kept."""
        return self._pieces[part.number][0]

    def drop(self, part: Part) -> None:
        """Forget the rows: nothing reads them again."""
        kept = self._pieces.pop(part.number, None)
        if kept is not None:
            piece, host = kept
            self._store.add(self._bytes, HOST if host else DEVICE, -piece.nbytes)
