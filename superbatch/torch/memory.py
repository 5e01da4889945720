"""Peak memory of a function call, counted the same way on every machine.

* CPU: torch has no public counter (``torch.distributed._tools.MemTracker`` is private, needs the distributed
package
  and hooks modules), so a dispatch mode keeps a ledger: a storage enters when an operation returns it and
  leaves at
  the moment it is freed. Views share a storage and add nothing; the backward pass is seen like the forward.
* CUDA: torch's own allocator statistics.
* Nothing is left behind: no mode, no hook, no reference that would keep a tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from superbatch.errors import InputError, explain


def peak_bytes(fn: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Run ``fn()`` and return the peak of the tensor bytes that were allocated during it and alive at once.

    Memory that was alive before the call counts zero, whatever ``fn`` does to it.
    On CUDA the number is ``max_memory_allocated - memory_allocated before`` (which resets the peak
    statistics).

    Args:
        fn: what to measure; its result is dropped.
        device: whose memory, one device. On CPU the bytes are those of tensor storages, without what a kernel
            allocates and frees inside one operation, and without storages made by no operation
            (``torch.load``, ``copy.deepcopy``, a kernel compiled by ``torch.compile``).

    Returns:
        Bytes.

    Raises:
        InputError: if the device is neither CPU nor CUDA.

    Examples:
        >>> import torch
        >>> peak_bytes(lambda: torch.zeros(1000, dtype=torch.float64).add(1).sum())
        16000
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_peak(fn)
    if device.type == "cuda":
        return _cuda_peak(fn, device)
    raise InputError(
        explain(
            f"device={str(device)!r}", "memory is counted on CPU and CUDA only", 'pass device="cpu" or "cuda"'
        )
    )


def _cpu_peak(fn: Callable[[], object]) -> int:
    ledger = _Ledger()
    with ledger:
        fn()
    return ledger.peak


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _Ledger(TorchDispatchMode):
    """Bytes of the CPU storages made while the mode was active: ``live`` now, ``peak`` so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        # Address of a live storage -> its bytes, and the weak reference that reports its end. An address is
        # used
        # again only after the storage is freed, and then its entry is gone already.
        self._bytes: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `torch.tensor(...)` allocates below the dispatcher and announces its result with `lift_fresh`: the
        # argument
        # of that operation is new. An unknown argument of any other operation was there before `fn`.
        if func is not torch.ops.aten.lift_fresh.default:
            for storage in _storages((args, kwargs)):
                self._enter(storage, outside=True)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._enter(storage, outside=False)
        if func._schema.is_mutable:  # `out=`, `resize_`, `set_`: a storage may have grown, or be a new one
            for storage in _storages((args, kwargs)):
                self._enter(storage, outside=False)
        return out

    def _enter(self, storage: torch.UntypedStorage, *, outside: bool) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._ends:
            self._ends[key] = weakref.ref(storage, partial(_leave, weakref.ref(self), key))
            self._bytes[key] = 0
            self._outside[key] = size if outside else 0
        counted = max(0, size - self._outside[key])
        self.live += counted - self._bytes[key]
        self._bytes[key] = counted
        self.peak = max(self.peak, self.live)

    def leave(self, key: int) -> None:
        self.live -= self._bytes.pop(key)
        del self._outside[key], self._ends[key]


def _leave(ledger: weakref.ref[_Ledger], key: int, _: object) -> None:
    there = ledger()
    if there is not None:
        there.leave(key)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from _storages_of_tensor(leaf)


def _storages_of_tensor(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        yield from _storages([getattr(tensor, name) for name in names])
    elif tensor.layout is torch.strided and tensor.device.type == "cpu":
        yield tensor.untyped_storage()
