"""Storage of rows for later sweeps: on the device up to a budget, then in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from superbatch.torch.window.transfer import SideStream, empty_on_host

from ..ir.layout import Part
from .prefetch import Prefetcher

ELSEWHERE = {"cuda", "xpu", "mps"}  # devices whose memory is not the host's


class Store:
    """Counts what is kept, and decides where.

    Args:
        device: where the rows are computed.
        budget: most bytes that stay there; None: all do. On a CPU both places are the same memory, and what
            is beyond the budget is only counted as the host's.

    Attributes:
        on_device, on_host: bytes that are kept now.
        most_on_device, most_on_host: the most at a time.
        whole, most_whole: bytes of whole values that grow with the batch, now and at most. They cannot go to
            the host; they leave so much less of the budget to rows.
        ahead: brings rows to the device; None where there is no other place.
    """

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self.budget = budget
        self.on_device = self.on_host = 0
        self.most_on_device = self.most_on_host = 0
        self.whole = self.most_whole = 0
        self._to_host = SideStream(device)
        self.ahead = Prefetcher(device, self._to_host) if device.type in ELSEWHERE else None

    def is_full(self, nbytes: int) -> bool:
        """Return whether that many more bytes would exceed the budget."""
        return self.budget is not None and self.on_device + self.whole + nbytes > self.budget

    def keep(self, piece: Tensor) -> tuple[Tensor, bool]:
        """Return the rows, where they are to be kept, and whether that is the host."""
        # A slice would keep alive all that it is a slice of.
        if piece.untyped_storage().nbytes() > 2 * piece.nbytes:
            piece = piece.clone()
        host = self.is_full(piece.nbytes)
        if host:
            self.on_host += piece.nbytes
            self.most_on_host = max(self.most_on_host, self.on_host)
            if self._device.type != "cpu":
                kept = empty_on_host(piece)
                with self._to_host.beside(after_computation=True):
                    kept.copy_(piece, non_blocking=True)
                self._to_host.hold(piece)
                piece = kept
        else:
            self.on_device += piece.nbytes
            self.most_on_device = max(self.most_on_device, self.on_device)
        return piece, host

    def forget(self, piece: Tensor, host: bool) -> None:
        """Count rows that are kept no longer."""
        if host:
            self.on_host -= piece.nbytes
        else:
            self.on_device -= piece.nbytes


class Held:
    """Memory of a whole value that grows with the batch: counted from here until it is freed.

    Args:
        store: what counts it.
        nbytes: how much.
    """

    def __init__(self, store: Store, nbytes: int) -> None:
        self._store, self._nbytes = store, 0
        store.whole, self._nbytes = store.whole + nbytes, nbytes  # on one line: counted once, and off once
        store.most_whole = max(store.most_whole, store.whole)

    def __del__(self) -> None:
        """Count it no longer."""
        if hasattr(self, "_nbytes"):  # not where its making failed
            self._store.whole -= self._nbytes


class RowStore:
    """Kept rows of a value, by micro-batch.

    Args:
        store: where.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pieces: dict[int, tuple[Tensor, bool]] = {}

    def put(self, part: Part, piece: Tensor) -> None:
        """Keep the rows of a micro-batch."""
        self._pieces[part.number] = self._store.keep(piece)

    def get(self, part: Part) -> Tensor:
        """Return the rows, where they are kept."""
        return self._pieces[part.number][0]

    def drop(self, part: Part) -> None:
        """Forget the rows: nothing reads them again."""
        kept = self._pieces.pop(part.number, None)
        if kept is not None:
            self._store.forget(*kept)

    def __del__(self) -> None:
        """Subtract the bytes that are freed with the value."""
        for kept in vars(self).get("_pieces", {}).values():  # none where its making failed
            self._store.forget(*kept)
