"""Memory of a device and of the host, measured separately on a machine without a device.

Device memory is that of storages made by operations, as counted by superbatch's `Ledger`. A value offloaded
to the host is copied without being counted, and copied back to read it. Otherwise torch and superbatch would
leave it in place on a CPU, or count the copy too.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from superbatch.torch.memory.ledger import Ledger
from superbatch.torch.virtual.run import store
from superbatch.torch.virtual.run.prefetch import Prefetcher
from superbatch.torch.virtual.run.store import Store


class Host:
    """Tensors on the host; `peak` is the largest number of bytes."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._places: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on the host."""
        return tensor.untyped_storage().data_ptr() in self._places

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host."""
        with _disable_current_modes():
            copy = tensor.detach().clone()
        self.live += copy.nbytes
        self.peak = max(self.peak, self.live)
        place = copy.untyped_storage().data_ptr()
        self._places.add(place)
        weakref.finalize(copy.untyped_storage(), self._leave, copy.nbytes, place)
        return copy

    def _leave(self, nbytes: int, place: int) -> None:
        self.live -= nbytes
        self._places.discard(place)


@contextmanager
def _saving_to(host: Host) -> Iterator[None]:
    """Replace `torch.autograd.graph.save_on_cpu`."""
    with torch.autograd.graph.saved_tensors_hooks(host.put, torch.clone):
        yield


class _FromHost(Prefetcher):
    """Copy of a tensor on the host, prefetched one tensor ahead, as on a device."""

    def __init__(self, host: Host) -> None:
        super().__init__(torch.device("cpu"))
        self._host = host

    def fetch(self, key: Any, rows: Tensor) -> Tensor:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == key:
            return coming[1]
        return rows.clone() if rows in self._host else rows

    def begin(self, key: Any, rows: Tensor) -> None:
        if rows in self._host:
            self._coming = key, rows.clone()


def measure(run: Callable[[], Any]) -> tuple[int, int]:
    """Run, and return the peaks on the device and on the host."""
    host, ledger = Host(), Ledger(torch.device("cpu"))
    keep = Store.keep

    def kept(self: Store, piece: Tensor) -> tuple[Tensor, bool]:
        piece, away = keep(self, piece)
        return (host.put(piece), True) if away else (piece, False)

    with (
        mock.patch.object(torch.autograd.graph, "save_on_cpu", return_value=_saving_to(host)),
        mock.patch.object(Store, "keep", kept),
        mock.patch.object(store, "OWN_MEMORY", {"cpu"}),
        mock.patch.object(store, "Prefetcher", return_value=_FromHost(host)),
        ledger,
    ):
        run()
    return ledger.peak, host.peak
