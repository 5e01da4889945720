"""Peak memory of a function call, counted the same way on every machine.

* CPU: a `Ledger`, because torch has no public counter. (``torch.distributed._tools.MemTracker`` is private,
  needs the distributed package, and adds hooks to modules.)
* CUDA: torch's own allocator statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from superbatch.errors import InputError

from .ledger import Ledger


def peak_bytes(fn: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Run ``fn()`` and return the peak of the tensor bytes that it has allocated.

    Memory allocated before the call is not counted, even if ``fn`` frees or writes it. On CUDA the result is
    ``max_memory_allocated - memory_allocated before``, and the peak statistics are reset.

    Args:
        fn: the function to measure; its result is not returned.
        device: one device. On the CPU only tensor storages that operations return are counted. Not counted
            are: memory that a kernel allocates and frees inside one operation; storages made by
            ``torch.load``, ``copy.deepcopy`` or kernels compiled by ``torch.compile``.

    Raises:
        InputError: the device is not a CPU or a CUDA device.

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
        f"The memory of device={str(device)!r} cannot be measured, only that of CPU and CUDA. Pass "
        'device="cpu" or "cuda".'
    )


def _cpu_peak(fn: Callable[[], object]) -> int:
    # Not rounded, so that the result is the same on every machine.
    ledger = Ledger(torch.device("cpu"))
    with ledger:
        fn()
    return ledger.peak


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    # Otherwise blocks that another stream uses would be freed during the measurement.
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
