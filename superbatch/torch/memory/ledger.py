"""Ledger of the tensor memory that operations allocate, for real and fake tensors.

A storage is counted from the operation that returns it until it is freed. Views share a storage and count
nothing; the backward is counted like the forward. The ledger keeps no tensor alive and leaves no hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Mode that counts the bytes of storages made on one device: `live` now, and the `peak` so far.

    Args:
        device: the device; without an index, all devices of that type.
        rounded: sizes of storages are rounded up to multiples of this many bytes, as allocators do.

    Examples:
        >>> with Ledger(torch.device("cpu"), rounded=64) as ledger:
        ...     kept = torch.zeros(3).add(1)
        >>> ledger.live, ledger.peak
        (64, 128)
    """

    def __init__(self, device: torch.device, *, rounded: int = 1) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._device = device
        self._rounded = rounded
        # By address of a live storage: its counted bytes, its bytes that existed before, and the weak
        # reference that reports when it is freed. An address is used again only after its entry was removed.
        self._bytes: dict[int, int] = {}
        self._existing: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> int:
        """Return the peak so far, and reset it to the live bytes."""
        peak, self.peak = self.peak, self.live
        return peak

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Exclude the memory of a tensor that existed before."""
        for storage in self._storages(tensor):
            self._enter(storage, existed=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `torch.tensor(...)` allocates below the dispatcher and passes its result to `lift_fresh`, whose
        # argument is therefore new. An argument of any other operation that was not seen yet existed before.
        if func is not torch.ops.aten.lift_fresh.default:
            for storage in self._storages((args, kwargs)):
                self._enter(storage, existed=True)
        out = func(*args, **kwargs)
        for storage in self._storages(out):
            self._enter(storage, existed=False)
        if func._schema.is_mutable:  # with `out=`, `resize_` or `set_` a storage may have grown or be new
            for storage in self._storages((args, kwargs)):
                self._enter(storage, existed=False)
        return out

    def _enter(self, storage: torch.UntypedStorage, *, existed: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._ends:
            self._ends[key] = weakref.ref(storage, partial(_leave, weakref.ref(self), key))
            self._bytes[key] = 0
            self._existing[key] = size if existed else 0
        # Allocators give whole blocks, so the size is rounded up.
        counted = -(-max(0, size - self._existing[key]) // self._rounded) * self._rounded
        self.live += counted - self._bytes[key]
        self._bytes[key] = counted
        self.peak = max(self.peak, self.live)

    def leave(self, key: int) -> None:
        """Remove a storage that is freed."""
        self.live -= self._bytes.pop(key)
        del self._existing[key], self._ends[key]

    def _storages(self, tree: Any) -> Iterator[torch.UntypedStorage]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                yield from self._storages_of_tensor(leaf)

    def _storages_of_tensor(self, tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
        if getattr(tensor, "memoryless", False):  # a `VirtualTensor`, which has no memory of its own
            return
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from self._storages([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.strided and self._is_here(tensor.device):
            yield tensor.untyped_storage()

    def _is_here(self, device: torch.device) -> bool:
        wanted = self._device
        return device.type == wanted.type and (wanted.index is None or device.index == wanted.index)


def _leave(ledger: weakref.ref[Ledger], key: int, _: object) -> None:
    alive = ledger()
    if alive is not None:
        alive.leave(key)
