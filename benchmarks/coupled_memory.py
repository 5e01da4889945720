"""Memory by place, on a machine that has one: what would lie on a device, and what beside it on the host.

The device's are the storages that operations make, as superbatch's `Ledger` counts them. What a way moves to
the host is really copied, out of the ledger's sight, and copied back where it is read: on a CPU torch and
superbatch would leave it where it is, or count the copy too.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from superbatch.torch.ledger import Ledger
from superbatch.torch.virtual.store import Store


class Host:
    """Tensors on the host: `peak` bytes at most."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host."""
        with _disable_current_modes():
            copy = tensor.detach().clone()
        self.live += copy.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(copy.untyped_storage(), self._leave, copy.nbytes)
        return copy

    def _leave(self, nbytes: int) -> None:
        self.live -= nbytes


@contextmanager
def _saving_to(host: Host) -> Iterator[None]:
    """In place of `torch.autograd.graph.save_on_cpu`."""
    with torch.autograd.graph.saved_tensors_hooks(host.put, torch.clone):
        yield


def measure(run: Callable[[], Any]) -> tuple[int, int]:
    """Run, and return the peaks on the device and on the host."""
    host, ledger = Host(), Ledger(torch.device("cpu"))
    keep = Store.keep

    def kept(store: Store, piece: Tensor) -> tuple[Tensor, bool]:
        piece, away = keep(store, piece)
        return (host.put(piece), True) if away else (piece, False)

    def fetched(store: Store, piece: Tensor) -> Tensor:
        return piece.clone() if store.budget is not None else piece

    with (
        mock.patch.object(torch.autograd.graph, "save_on_cpu", return_value=_saving_to(host)),
        mock.patch.object(Store, "keep", kept),
        mock.patch.object(Store, "fetch", fetched),
        ledger,
    ):
        run()
    return ledger.peak, host.peak
