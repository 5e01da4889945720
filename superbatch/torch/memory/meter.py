"""Peak memory of a function call, counted the same way on every machine.

* CPU: torch has no public counter (``torch.distributed._tools.MemTracker`` is private, needs the distributed
  package and hooks modules), so a dispatch mode keeps a `Ledger`.
* CUDA: torch's own allocator statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from superbatch.errors import InputError

from .ledger import Ledger


def peak_bytes(fn: Callable[[], object], *, device: torch.device | str = "cpu") -> int:
    """Run ``fn()`` and return the peak of the tensor bytes that were allocated during it and alive at once.

    Memory that was alive before the call counts zero, whatever ``fn`` does to it.
    On CUDA the number is ``max_memory_allocated - memory_allocated before`` (which resets the peak
    statistics).

    Args:
        fn: the call to measure; its result is dropped.
        device: whose memory, one device. On CPU the bytes are those of tensor storages, without memory that a
            kernel allocates and frees inside one operation, and without storages made by no operation
            (``torch.load``, ``copy.deepcopy``, a kernel compiled by ``torch.compile``).

    Returns:
        Bytes.

    Raises:
        InputError: if the device is not a CPU or a CUDA device.

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
        f'Memory of device={str(device)!r} cannot be counted, only that of CPU and CUDA. Pass device="cpu" '
        'or "cuda".'
    )


def _cpu_peak(fn: Callable[[], object]) -> int:
    # Not rounded: the bytes of the tensors are the same on every machine.
    ledger = Ledger(torch.device("cpu"))
    # The result is dropped inside: it counts while it is alive.
    with ledger:
        fn()
    return ledger.peak


def _cuda_peak(fn: Callable[[], object], device: torch.device) -> int:
    # Blocks that another stream uses are freed when it is done, which must not be meanwhile.
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    # The allocator has a single peak.
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
